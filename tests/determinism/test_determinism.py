"""tpi.determinism: every setting is set and restored, conflicts and late calls are errors, and seeds repeat a run."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpus import gpu
from torch.utils.checkpoint import CheckpointError, checkpoint

import tp_invariant as tpi
from tp_invariant.determinism import settings as determinism
from tp_invariant.determinism.settings import PROFILES, SETTINGS
from tp_invariant.testing import assert_bitwise_equal, run_ranks

BY_NAME = {setting.name: setting for setting in SETTINGS}
TOO_LATE = determinism.Setting.too_late
DETERMINISTIC = "torch.use_deterministic_algorithms"


def values():
    return {setting.name: setting.read() for setting in SETTINGS}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Every setting at torch's default, whatever this machine's environment has, and restored afterwards."""
    before = values()
    for setting in reversed(SETTINGS):  # torch refuses split-K off with reduced precision on
        setting.write(setting.default)
    # CUDA may run here, from other tests; those that ask about it say so
    monkeypatch.setattr(determinism.Setting, "too_late", lambda self: self.reader == "NCCL" and TOO_LATE(self))
    yield
    for setting in reversed(SETTINGS):
        setting.write(before[setting.name])


def draws():
    return random.random(), np.random.rand(), torch.rand(3)


# --- the table ------------------------------------------------------------------------------------------------------


FRESH = """
from tp_invariant.determinism.settings import SETTINGS
print([setting.name for setting in SETTINGS if setting.read() != setting.default])
"""


def test_defaults_are_torchs_own():
    """In a process that has set nothing."""
    ours = {setting.name for setting in SETTINGS if setting.where == "env"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_context_sets_its_profile_and_restores_everything(profile):
    before = values()
    with determinism.deterministic(0, profiles=(profile,)):
        inside = values()
        for setting in SETTINGS:
            mine = profile in setting.profiles.split()
            assert inside[setting.name] == (setting.value if mine else before[setting.name]), setting.name
    assert values() == before


def test_torchs_own_functions_see_the_settings():
    """Read through torch's own functions, not the table's."""
    with determinism.deterministic(0, profiles=PROFILES):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
        assert not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NCCL_ALGO"] == "ring,tree;allreduce:tree"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
    assert "NCCL_ALGO" not in os.environ


def test_exceptions_restore_and_contexts_nest():
    before = values()
    state = torch.get_rng_state()
    with pytest.raises(KeyError), determinism.deterministic(1, profiles=("wire",)):
        outer = values()
        with pytest.raises(KeyError), determinism.deterministic(2, warn_only=True):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            with determinism.deterministic(3):  # another warn_only is no conflict
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                assert os.environ["NCCL_PROTO"] == "Simple"
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            raise KeyError
        assert values() == outer
        raise KeyError
    assert values() == before
    assert_bitwise_equal(torch.get_rng_state(), state)


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_seeds_every_generator_and_restores_them():
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    expected_after = draws()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    seen = []
    for seed in (7, 7, 8):
        with determinism.deterministic(seed):
            seen.append(draws())
    assert_bitwise_equal(seen[0], seen[1])
    for first, second in zip(seen[0], seen[2], strict=True):
        assert (first != second) if isinstance(first, float) else not torch.equal(first, second)
    assert_bitwise_equal(draws(), expected_after)


def draws_on_a_rank(tp_group, seed):
    torch.manual_seed(tp_group.rank())  # ranks that are apart
    with determinism.deterministic(seed, profiles=("wire",)):
        return draws()


def test_ranks_draw_equal_numbers():
    first, second = run_ranks(draws_on_a_rank, 2, 11, device="cpu")
    assert_bitwise_equal(first, second)
    assert not torch.equal(run_ranks(draws_on_a_rank, 2, 12, device="cpu")[0][2], first[2])


def test_enable_is_not_undone():
    seen = []
    for _ in range(2):  # twice is as once
        determinism.enable(4, profiles=PROFILES)
        seen.append(draws())
        assert all(setting.holds() for setting in SETTINGS)
    assert_bitwise_equal(seen[0], seen[1])
    assert all(row.is_set for row in determinism.report())
    determinism.enable(4, warn_only=True)  # its own earlier value is no conflict
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, None, True, "0"], ids=repr)
def test_another_seed(seed):
    text = f"seed={seed!r} is not understood: pass an integer from 0 to 4294967295"
    for call in (lambda: determinism.enable(seed), lambda: determinism.deterministic(seed).__enter__()):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call()


# --- conflicts, and too late ----------------------------------------------------------------------------------------

USERS = [
    ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
    ("NCCL_ALGO", "Ring"),
    ("torch.backends.cudnn.benchmark", True),
    ("torch.set_float32_matmul_precision", "high"),
    ("torch._inductor.config.max_autotune", True),
]


@pytest.mark.parametrize(("name", "value"), USERS, ids=lambda v: str(v))
def test_a_users_own_value_is_a_conflict(name, value):
    setting = BY_NAME[name]
    setting.write(value)
    before = values()
    text = f"{name} is {value!r} and should be {setting.value!r} ({setting.why}): unset it, or pass override=True"
    with pytest.raises(ValueError, match=re.escape(text)):
        determinism.enable(0, profiles=PROFILES)
    assert values() == before  # nothing was set
    with determinism.deterministic(0, profiles=PROFILES, override=True):
        assert setting.read() == setting.value
    assert setting.read() == value


def test_after_cuda_has_started(monkeypatch):
    monkeypatch.setattr(determinism.Setting, "too_late", lambda self: self.reader == "CUDA")
    before = values()
    text = (
        "CUBLAS_WORKSPACE_CONFIG is None and should be ':4096:8', but CUDA has started in this process and has read "
        "it: call this before the first use of CUDA, or start the program with CUBLAS_WORKSPACE_CONFIG=':4096:8' in "
        "its environment"
    )
    for override in (False, True):
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            determinism.enable(0, override=override)
    assert values() == before
    row = next(row for row in determinism.report() if row.name == "CUBLAS_WORKSPACE_CONFIG")
    assert row.too_late and "too late to set in this process" in str(row)


def test_what_cuda_read_inside_stays(monkeypatch):
    with determinism.deterministic(0):
        monkeypatch.setattr(determinism.Setting, "too_late", lambda self: self.reader == "CUDA")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.are_deterministic_algorithms_enabled()
    with determinism.deterministic(0):
        pass
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]  # the control
    with pytest.raises(RuntimeError, match="CUDA has started"):
        determinism.enable(0)


def test_after_nccl_has_started(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with determinism.deterministic(0, profiles=("wire",)):  # gloo reads none of it
            pass
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        with pytest.raises(RuntimeError, match=r"NCCL_ALGO is None and should be .* but NCCL has started"):
            determinism.enable(0, profiles=("wire",))
    finally:
        dist.destroy_process_group()


# --- report and checkpointing ---------------------------------------------------------------------------------------


def test_report():
    rows = {row.name: row for row in tpi.determinism.report()}
    assert list(rows) == [setting.name for setting in SETTINGS]
    assert not rows[DETERMINISTIC].is_set and rows["torch.backends.cudnn.benchmark"].is_set
    with determinism.deterministic(0, profiles=("wire",)):
        report = determinism.report(("wire",))
        assert {row.name for row in report} == {s.name for s in SETTINGS if "wire" in s.profiles.split()}
        assert all(row.is_set for row in report)
        assert "set      NCCL_PROTO (env; wire, vllm) = Simple" in str(report).splitlines()
    setting = BY_NAME["NCCL_PROTO"]
    lines = str(determinism.report(("wire",))).splitlines()
    at = lines.index("NOT SET  NCCL_PROTO (env; wire, vllm) = None, wanted Simple")
    assert lines[at + 1 : at + 3] == [f"         without it: {setting.why}", f"         with it: {setting.cost}"]


def test_checkpoint_kwargs():
    x = torch.randn(64, requires_grad=True)

    def block(x):
        return torch.nn.functional.dropout(x, 0.5).square()

    def grad_is_of_the_first_forward(**kwargs):
        x.grad = None
        y = checkpoint(block, x, **kwargs)
        y.sum().backward()
        return torch.equal(x.grad, torch.where(y == 0, 0.0, 8 * x))  # y = (2x)^2 where the first mask kept x

    assert grad_is_of_the_first_forward(**determinism.checkpoint_kwargs())
    assert not grad_is_of_the_first_forward(use_reentrant=False, preserve_rng_state=False)

    widths = iter([64, 32])

    def unstable(x):
        return x[: next(widths)].square()

    with pytest.raises(CheckpointError):
        checkpoint(unstable, x, **determinism.checkpoint_kwargs()).sum().backward()


@gpu
def test_cuda_generators_are_seeded_and_restored():
    torch.cuda.init()
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NVIDIA_TF32_OVERRIDE"] = ":4096:8", "0"
    seen = []
    for _ in range(2):
        with determinism.deterministic(1):
            seen.append(torch.rand(4, device="cuda"))
    assert_bitwise_equal(seen[0], seen[1])
    assert_bitwise_equal(torch.rand(4, device="cuda"), expected)


START = """
import os, torch
from tp_invariant import determinism

def product():
    x = torch.randn(64, 64, device="cuda")
    return x @ x

torch.manual_seed(5)
with determinism.deterministic(0):
    torch.rand(1, device="cuda")  # starts CUDA
    first = product() if INSIDE else None
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
seeded = torch.rand(4, device="cuda")
torch.cuda.manual_seed(5)
assert torch.equal(seeded, torch.rand(4, device="cuda")), "the seed from before"
product()  # outside
with determinism.deterministic(0):
    torch.rand(1, device="cuda")
    again = product()  # which torch 2.13 refuses if cuBLAS has not read the variable; 2.11 may not notice
assert first is None or torch.equal(first, again)
"""


@gpu
@pytest.mark.parametrize(
    ("before", "error"),
    [
        ("INSIDE = True", ""),
        ("INSIDE = False", ""),
        (
            "import torch\nINSIDE = torch.ones(1, device='cuda')",
            "CUBLAS_WORKSPACE_CONFIG is None and should be ':4096:8', but CUDA has started in this process",
        ),
    ],
    ids=["product inside", "no product inside", "started before"],
)
def test_entered_again_after_cuda_has_started_inside(before, error):
    """In a process of its own, as cuBLAS reads its variable once."""
    env = {name: value for name, value in os.environ.items() if name not in BY_NAME}
    command = [sys.executable, "-c", f"{before}\n{START}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert error in done.stderr and bool(error) == bool(done.returncode), done.stderr
