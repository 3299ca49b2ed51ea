"""The example that captures whole training steps: one digest, captured and not, at every degree."""

import pytest
import torch

from tp_invariant.examples.train_in_one_graph import make_parser, run
from tp_invariant.testing import run_ranks

SMALL = ["--hidden", "64", "--layers", "1", "--length", "16", "--steps", "4"]


def trained(tp_group, arguments):
    return run(tp_group, make_parser().parse_args(arguments))


def test_the_same_bits_at_every_degree():
    arguments = ["--device", "cpu", *SMALL]
    losses, digest = run_ranks(trained, 1, arguments, device="cpu")[0]
    assert all(abs(loss - 5.545) < 0.6 for loss in losses), "of random tokens: the logarithm of 256"
    for found in run_ranks(trained, 2, arguments, device="cpu"):
        assert found == (losses, digest)
    assert run_ranks(trained, 1, [*arguments, "--steps", "5"], device="cpu")[0][1] != digest, "the last step counts"


def test_what_is_refused():
    for arguments, problem in ((["--graph"], "--graph needs a GPU"), (["--warmup", "4"], "--warmup 4 of --steps 4")):
        with pytest.raises(ValueError, match=problem):
            trained(None, ["--device", "cpu", *SMALL, *arguments])


@pytest.mark.gpu
@pytest.mark.parametrize("degree", (1, 2))
def test_captured_on_gpus(degree):
    if degree > torch.cuda.device_count():
        pytest.skip(f"needs {degree} GPUs")

    arguments = ["--device", "cuda", "--layers", "2"]
    want = run_ranks(trained, 1, arguments, device="cuda")[0]
    for found in run_ranks(trained, degree, [*arguments, "--graph"], device="cuda"):
        assert found == want
