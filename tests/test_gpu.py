"""The contract on GPUs: NCCL, the Triton kernels, real shapes. Skipped where there are too few GPUs.

The matrices of test_linear and test_layernorm_linear run on gloo; here the same cases run on the device, fewer of them
and larger.
"""

from __future__ import annotations

import itertools

import hf_models
import pytest
import torch
from gpus import on_gpus
from layer_cases import Case, assert_cases_invariant, check_accuracy, run

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group, gather_dim, resolve_group
from tp_invariant.testing import assert_bitwise_equal, full_grads, gpu_ranks, run_ranks

GPUS = gpu_ranks()
pytestmark = pytest.mark.gpu
DEGREES = on_gpus(2, 3, 4, 8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OWNER_MAPS = ("replicate", "rows", "cols", "auto")


@pytest.fixture(scope="module", autouse=True)
def pool():
    """One pool of all GPUs for every degree."""
    if GPUS > 1:
        run_ranks(lambda group: None, GPUS, device="cuda")


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ("column", "row"))
def test_linear(mode, dtype, degree):
    cases = []
    for stride, owner_map in itertools.product((1, 2, 3), OWNER_MAPS):
        sharded = degree * stride * 136
        k, n = (264, sharded) if mode == "column" else (sharded, 264)
        base = Case(mode, k, n, (130,), dtype=dtype, stride=stride, owner_map=owner_map, device="cuda")
        cases += [
            base,
            base.with_(tokens=(1,)),
            base.with_(tokens=(0,)),
            base.with_(sequence_parallel=True, tokens=(64 * degree,), bias=False),
            base.with_(sequence_parallel=True, tokens=(3, 16 * degree), sequence_dim=1),
        ]
        odd = degree * stride * 17
        k, n = (53, odd) if mode == "column" else (odd, 53)
        cases.append(base.with_(in_features=k, out_features=n, tokens=(3, 5)))
    assert_cases_invariant(cases, degree, device="cuda")


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ("LayerNorm", "RMSNorm"))
def test_layernorm_linear(norm, dtype, degree):
    cases = []
    for zero_centered, owner_map in itertools.product((False, True), OWNER_MAPS):
        base = Case("column", 1024, degree * 128, (70,), norm=norm, stride=2, dtype=dtype, device="cuda")
        base = base.with_(owner_map=owner_map, zero_centered=zero_centered)
        cases += [
            base,
            base.with_(sequence_parallel=True, tokens=(degree * 64, 2)),
            base.with_(sequence_parallel=True, tokens=(3, degree * 32), sequence_dim=1, return_norm=True),
            base.with_(sequence_parallel=True, tokens=(degree * 7,), return_norm=True, return_norm_gathered=True),
        ]
    assert_cases_invariant(cases, degree, device="cuda")


def mixture(tp_group, dtype, sequence_parallel, by_expert, device="cuda"):
    """Two micro-batches of a mixture of experts, the second with its tokens in reverse order; whole tensors."""
    group = resolve_group(tp_group)
    with tpi.set_tp_invariant_mode(True):
        torch.manual_seed(0)
        model = tpi.MixtureOfExperts(
            24, 264, 384, tpi.Routing(3), bias=True, activation="clamped_silu", interleaved=True, tp_group=tp_group,
            expert_parallel_group=tp_group if by_expert else None, sequence_parallel=sequence_parallel, dtype=dtype,
        ).to(device)  # fmt: skip
        x, dy = (torch.randn(120, 264, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in (1, 2))
        results = []
        for _ in range(2):
            x, dy = x.flip(0), dy.flip(0)
            own, d_own = ((t.chunk(group.size)[group.rank] if sequence_parallel else t).clone() for t in (x, dy))
            y = model(own.requires_grad_())
            y.backward(d_own)
            results += [gather_dim(t, 0, group) if sequence_parallel else t for t in (y.detach(), own.grad)]
        results += [full_grads(model), tpi.clip_grad_norm_(model.parameters(), 1.0)]
    return results


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mixture_of_experts(dtype, degree):
    for by_expert in (False, True):
        want = run_ranks(mixture, 1, dtype, False, by_expert, device="cuda")[0]
        for sequence_parallel in (False, True):
            for got in run_ranks(mixture, degree, dtype, sequence_parallel, by_expert, device="cuda"):
                assert_bitwise_equal(got, want)


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_a_mixture_of_experts_has_the_values_of_a_cpu():
    cuda, cpu = (mixture(None, torch.float32, False, False, device) for device in ("cuda", "cpu"))
    for got, want in zip(cuda[:4], cpu[:4], strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    for name, want in cpu[4].items():
        torch.testing.assert_close(cuda[4][name].cpu(), want, rtol=1e-4, atol=1e-3)


def train_transformers_mixture(tp_group, family, by_expert=False, mode=True):
    model = hf_models.build(family, torch.bfloat16).to("cuda")
    stored = (Group(None, 0, 1) if tp_group is None else tp_group) if by_expert else None
    model = tpi.parallelize(model, tp_group, expert_parallel_group=stored)
    with tpi.set_tp_invariant_mode(mode):
        return hf_models.train(model, tp_group, 3)


@pytest.mark.parametrize("degree", on_gpus(2, 4))
@pytest.mark.parametrize("family", sorted(hf_models.MIXTURES))
def test_a_mixture_of_transformers(family, degree):
    """Three steps of AdamW: logits, gradients, losses, norms and parameters."""
    pytest.importorskip("transformers")
    if not hf_models.has_plan(family):
        pytest.skip("this version of transformers has no tensor-parallel plan for its layers")
    for by_expert in (False, True) if family == "mixtral" else (False,):
        want = train_transformers_mixture(None, family, by_expert)
        for got in run_ranks(train_transformers_mixture, degree, family, by_expert, device="cuda"):
            assert_bitwise_equal(got, want)


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_mixture_of_transformers_with_the_mode_off():
    pytest.importorskip("transformers")
    on, off = (train_transformers_mixture(None, "mixtral", mode=mode) for mode in (True, False))
    for got in run_ranks(train_transformers_mixture, 2, "mixtral", False, False, device="cuda"):
        logits = got["logits"].to(off["logits"].device)
        assert not torch.equal(logits, off["logits"])
        torch.testing.assert_close(logits, on["logits"], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("degree", on_gpus(2, 4, 8))
@pytest.mark.parametrize("mode", ("column", "row"))
def test_qwen3_8b_sizes(mode, degree):
    """The gated MLP's two layers at full size, 2048 tokens, bf16, one micro-batch."""
    k, n = (4096, 24576) if mode == "column" else (12288, 4096)
    case = Case(mode, k, n, (2048,), dtype=torch.bfloat16, bias=False, device="cuda", micro_batches=1)
    case = case.with_(stride=2 if mode == "column" else 1, sequence_parallel=True)
    assert_cases_invariant([case.with_(owner_map=owner_map) for owner_map in OWNER_MAPS], degree, device="cuda")


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("mode", "name"), [("row", "y0"), ("column", "dx0")])
@pytest.mark.parametrize("sp", (False, True))
def test_negative_control(mode, name, sp):
    degree = GPUS
    case = Case(mode, 1024, 1024, (64, 4), dtype=torch.bfloat16, sequence_parallel=sp, device="cuda", mode=False)
    want = run(None, case.as_reference)[name]
    for got in run_ranks(run, degree, case, device="cuda"):
        assert not torch.equal(got[name], want)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bundled_gemm_is_slice_invariant(dtype):
    from tp_invariant.kernels.gemm.matmul import matmul

    shapes = ((70, 130, 300), (33, 257, 1024), (256, 192, 2048), (5, 3, 17), (1024, 512, 4096), (1, 1, 1))
    tpi.testing.assert_slice_invariant(matmul, shapes=shapes, dtypes=(dtype,), device="cuda")


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("norm", (None, "LayerNorm", "RMSNorm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(norm, dtype):
    """TP=1 in the mode against float64, beside torch's own layer on the same GPU."""
    check_accuracy(Case("column", 2048, 512, (300,), norm=norm, dtype=dtype, device="cuda", micro_batches=1))


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_repeats_under_load():
    """The same call while another stream keeps the GPU busy."""
    case = Case("column", 1024, 1024, (513,), dtype=torch.bfloat16, norm="RMSNorm", device="cuda", micro_batches=1)
    want = run(None, case)
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        with torch.cuda.stream(side):
            for _ in range(20):
                busy @ busy
        assert_bitwise_equal(run(None, case), want)
