"""What torch.save wrote while the package was one folder: layers, parameters with their group, a digest log.

Checkpoints of an earlier version: test_damaged_checkpoints.py.
"""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm.collectives import gather_major
from tp_invariant.consistency.agreement import AgreedCalls
from tp_invariant.core.elementwise import PositionInvariantActivation
from tp_invariant.diagnostics.diff import read_log
from tp_invariant.testing import assert_bitwise_equal

FOLDER = Path(__file__).parent / "pickles_1"  # of rank 1 of 2


def test_layers():
    layers, embedding = torch.load(FOLDER / "module.pt", weights_only=False)
    kinds = [tpi.LayerNormLinear, nn.GELU, tpi.Linear, tpi.ParallelNorm, tpi.VocabParallelEmbedding]
    assert [type(module) for module in (*layers, embedding)] == kinds
    assert_bitwise_equal(dict(layers.state_dict()), dict(torch.load(FOLDER / "state.pt", weights_only=True)))
    assert [(layers[i].group.rank, layers[i].group.size) for i in (0, 2, 3)] == [(1, 2)] * 3
    with pytest.raises(ValueError, match=r"the global ranks \[0, 1\]; this process has no such group"):
        gather_major(torch.zeros(2), layers[0].group)


def test_parameters():
    parameters = torch.load(FOLDER / "parameters.pt", weights_only=True)
    state = torch.load(FOLDER / "state.pt", weights_only=True)
    assert_bitwise_equal([p.detach() for p in parameters], list(state.values()))
    sharded = [p for p in parameters if getattr(p, "tensor_model_parallel", False)]
    assert [(p.tp_group.rank, p.tp_group.size) for p in sharded] == [(1, 2)] * 3


FORMER_NAMES = {PositionInvariantActivation: b"WholeVectors", AgreedCalls: b"Agreed"}


@pytest.mark.parametrize("cls", FORMER_NAMES)
def test_a_class_under_its_former_name(cls):
    made = cls(nn.SiLU()) if cls is PositionInvariantActivation else cls()
    data = pickle.dumps(made, protocol=2)  # names a class by its module and its name
    name = cls.__name__.encode() + b"\n"
    assert data.count(name) == 1
    assert type(pickle.loads(data.replace(name, FORMER_NAMES[cls] + b"\n"))) is cls
    with pytest.raises(AttributeError):
        pickle.loads(data.replace(name, b"NoSuchName\n"))


def test_a_digest_log():
    assert list(read_log(FOLDER / "run.digests").steps) == [1]


def test_the_command_that_was_installed():
    program = "import sys; from tp_invariant.cli import main; sys.exit(main(['--version']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, f"tp-invariant {tpi.__version__}\n"), done.stderr
