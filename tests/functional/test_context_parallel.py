"""tpi.attention with cp_group: a rank's part of the tokens has the bytes that it has on one rank; values; errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import ALL, KINDS, attend, naively, plainly, tensors
from cases import more
from fuzz_runtime import group_of
from meshes import init_device_mesh
from moved_bytes import check_ranks
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.functional.context_parallel import with_all_tokens
from tp_invariant.testing import assert_bitwise_equal, gpu_ranks
from tp_invariant.testing import run_ranks as run_on_gpus

DTYPES = (torch.float32, torch.bfloat16)
# query heads, key heads, sequences: one key head for each query head; for each rank; for several ranks; for some
HEADS = {"MHA": (4, 4, 1), "GQA": (8, 4, 2), "kv < cp": (8, 2, 1), "MQA": (4, 1, 2), "runs of three": (12, 4, 1)}
TOKENS = 144  # more than a block of keys


def part_of(x, group, dim=2):
    return x.chunk(group.size, dim)[group.rank]


def on_ranks(data, group, attention=tpi.attention, cp_group=None, **options):
    """The results of this rank's part of q, k, v and dout."""
    return attend(*(part_of(x, group) for x in data), attention, cp_group=cp_group or group, **options)


def assert_parts(got, whole, group, where):
    assert got.keys() == whole.keys()
    parts = {name: part_of(x, group) if name in ("out", "dq", "dk", "dv") else x for name, x in whole.items()}
    for name, x in got.items():
        assert_bitwise_equal(x.contiguous(), parts[name].contiguous(), f"{name}, {where}")


@pytest.fixture(scope="module", autouse=True)
def pool():
    run_ranks(lambda group: None, 4)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("degree", "dtype"), ((2, torch.float32), more(2, torch.bfloat16), (4, torch.float32), (4, torch.bfloat16)), ids=str
)
def test_bits_are_those_of_one_rank(degree, heads, dtype):
    (of_q, of_k, batch) = HEADS[heads]

    def case(group):
        data = tensors("cpu", dtype, batch, of_q, of_k, TOKENS, TOKENS, 16)
        cu = torch.tensor([0, 5, 5, 101, TOKENS], dtype=torch.int32)
        kinds = dict(KINDS, all=ALL, sinks=dict(causal=True, sinks=torch.linspace(-2, 3, of_q).requires_grad_()))
        if batch == 1:
            kinds["packed"] = dict(causal=True, cu_seqlens_q=cu)
            kinds["packed, all"] = dict(ALL, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=96, max_seqlen_k=99)
        for kind, options in kinds.items():
            assert_parts(on_ranks(data, group, **options), attend(*data, **options), group, kind)
        return len(kinds)

    check_ranks(degree, case)


@pytest.mark.parametrize("heads", ("GQA", "kv < cp"))
def test_masks_and_other_head_sizes(heads):
    of_q, of_k, _ = HEADS[heads]

    def case(group):
        generator, data = torch.Generator().manual_seed(0), tensors("cpu", torch.bfloat16, 2, of_q, of_k, 40, 40, 16)
        seen = torch.rand(2, 1, 40, 40, generator=generator) < 0.7
        bias = torch.randn(of_q, 40, 40, generator=generator)
        learned, of_keys = bias.clone().requires_grad_(), torch.randn(1, of_q, 1, 40, generator=generator)
        masks = seen, bias, learned, of_keys.requires_grad_()
        for mask in masks:
            for options in (dict(mask=mask), dict(mask=mask, causal=True, softcap=3.0)):
                assert_parts(on_ranks(data, group, **options), attend(*data, **options), group, mask.shape)
        q, k, v, dout = data
        for case in ((q, k, v[..., :8], dout[..., :8]), (q[..., :12], k[..., :12], v, dout)):
            assert_parts(on_ranks(case, group, causal=True), attend(*case, causal=True), group, "D and E differ")
        no_grad = tpi.attention(*(part_of(x, group) for x in (q, k, v)), causal=True, cp_group=group)
        assert_bitwise_equal(no_grad.contiguous(), part_of(tpi.attention(q, k, v, causal=True), group).contiguous())
        return len(masks)

    check_ranks(4, case)


def test_the_controls_differ():
    """A ring, which adds over parts of the keys; torch's attention of a rank's heads; dk of keys that the caller has
    repeated, which autograd adds in bfloat16."""

    def case(group):
        data = tensors("cpu", torch.float32, 1, 8, 2, TOKENS, TOKENS, 24)
        q, k, v, _ = data
        assert not torch.equal(ring(q, k, v, group.size), ring(q, k, v, 1))
        naive = on_ranks(data, group, by(naively), causal=True)
        assert not torch.equal(naive["out"], part_of(attend(*data, naively, causal=True)["out"], group))
        data = tensors("cpu", torch.bfloat16, 1, 8, 2, TOKENS, TOKENS, 24)
        whole, repeated = attend(*data, causal=True), on_ranks(data, group, with_repeated_keys, causal=True)
        assert_bitwise_equal(repeated["dq"].contiguous(), part_of(whole["dq"], group).contiguous())
        for name in ("dk", "dv"):
            assert not torch.equal(repeated[name], part_of(whole[name], group)), name
        return 1

    check_ranks(4, case)


def ring(q, k, v, parts):
    """Full attention, added over as many parts of the keys."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    total = out = 0.0
    for keys, values in zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True):
        weights = (q @ keys.mT * q.shape[-1] ** -0.5).exp()
        total, out = total + weights.sum(-1, keepdim=True), out + weights @ values
    return out / total


def by(attention):
    """An attention of all tokens of this rank's heads."""

    def call(q, k, v, cp_group, **options):
        return with_all_tokens(lambda *x: attention(*x, **options), q, k, v, cp_group)

    return call


def with_repeated_keys(q, k, v, **options):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return tpi.attention(q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype):
    def case(group):
        data = tensors("cpu", dtype, 1, 8, 2, TOKENS, TOKENS, 16, spread=0)
        exact, theirs = attend(*(x.double() for x in data), plainly, **ALL), attend(*data, plainly, **ALL)
        for name, x in on_ranks(data, group, **ALL).items():
            value, of_torch = part_of(exact[name], group), part_of(theirs[name], group)
            errors = [float((one.double() - value).norm() / value.norm()) for one in (x, of_torch)]
            assert errors[0] <= max(1.2 * errors[1], 4 * torch.finfo(torch.float32).eps), (name, errors)
        stock = on_ranks(data, group, by(sdpa), is_causal=True)
        for name, x in attend(*data, sdpa, is_causal=True).items():
            torch.testing.assert_close(stock[name], part_of(x, group), rtol=2e-2, atol=2e-2)
        return 1

    check_ranks(4, case)


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def test_what_a_cp_group_may_be():
    def case(group):
        data = tensors("cpu", torch.float32, 1, 4, 2, 16, 16, 8)
        whole, mesh = attend(*data, causal=True), init_device_mesh("cpu", (1, group.size), mesh_dim_names=("dp", "cp"))
        for cp_group in (group, group.process_group, mesh["cp"]):
            assert_parts(on_ranks(data, group, cp_group=cp_group, causal=True), whole, group, type(cp_group))
        assert_bitwise_equal(attend(*data, causal=True, cp_group=mesh["dp"]), whole)  # of one rank
        for wrong, error, text in (
            (mesh, ValueError, r'cp_group is a 2-dim.* mesh\["cp"\]'),
            (2, TypeError, "cp_group=2"),
        ):
            with pytest.raises(error, match=text):
                tpi.attention(*data[:3], cp_group=wrong)
        return 1

    check_ranks(4, case)


def test_torch_compile():
    def case(group):
        checks = 0
        for of_q, of_k in ((4, 4), (4, 1)):
            data, sinks = (
                tensors("cpu", torch.bfloat16, 1, of_q, of_k, 32, 32, 16),
                torch.ones(of_q, requires_grad=True),
            )
            compiled = torch.compile(
                lambda q, k, v, sinks, cp_group: tpi.attention(q, k, v, causal=True, sinks=sinks, cp_group=cp_group),
                fullgraph=True, backend="aot_eager",
            )  # fmt: skip
            whole = attend(*data, causal=True, sinks=sinks)
            assert_parts(on_ranks(data, group, compiled, sinks=sinks), whole, group, (of_q, of_k))
            checks += 1
        return checks

    check_ranks(2, case)


# --- errors ---------------------------------------------------------------------------------------------------------


def wrong_call(group, kind):
    """(q, k, v), options of a call that is wrong on every rank, or on rank 1."""
    q, k, v, _ = tensors("cpu", torch.float32, 1, 6, 2, 8, 8, 8)
    q, k, v = (part_of(x, group) for x in (q, k, v))
    ours = group.rank == 1
    return {
        "heads": ((q[:, :4], k, v), {}),
        "a cache": ((q[:, :, :1], k, v), {}),
        "first_key": ((q, k, v), dict(causal=True, window=1, first_key=1)),
        "tokens": ((q, k, v) if ours else (q[:, :, :1], k[:, :, :1], v[:, :, :1]), {}),
        # not leaves: those are not compared once torch.distributed.pipelining is imported, whose stages get such
        "all tokens": ([torch.ones_like(x).requires_grad_().cumsum(2) for x in (q, k, v)], {}),
        "mask": ((q, k, v), dict(mask=torch.ones(2, 2, dtype=torch.bool))),
        "mask of one rank": ((q, k, v), dict(mask=torch.ones(2, 2, dtype=torch.bool)) if ours else {}),
        "window": ((q, k, v), dict(causal=True, window=2 if ours else 3)),
    }[kind]


@pytest.mark.parametrize(
    "kind, degree, texts",
    [
        ("heads", 3, ("q has 4 heads on rank", "cp_group has 3 ranks", "multiple")),
        ("a cache", 2, ("q has 1 tokens and k 4 on rank", "cache", "cross-attention")),
        ("first_key", 2, ("first_key is given on rank",)),
        ("tokens", 2, ("the shape of q", "(1, 6, 1, 8)", "(1, 6, 4, 8)", "cp_group")),
        ("all tokens", 2, ("q of attention", "the same", "Pass this rank's part of the tokens")),
        ("mask", 2, ("mask is (2, 2)", "(1, 6, 8, 8)")),
        ("mask of one rank", 2, ("rank 1", "mask is (2, 2)")),
        ("window", 2, ("the options of attention",)),
    ],
)
def test_errors_are_on_every_rank(kind, degree, texts):
    """In a new group each: ranks exchange what they find wrong at the first call."""

    def case(group):
        new = group_of(list(range(group.size)), f"for the case: {kind}")
        qkv, options = wrong_call(group, kind)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            tpi.attention(*qkv, cp_group=new, **options)
        for text in texts:
            assert text in str(caught.value), str(caught.value)
        return 1

    check_ranks(degree, case)


# --- GPUs -----------------------------------------------------------------------------------------------------------


def on_gpus(tp_group, of_q, of_k, kind):
    """Eager and as a CUDA graph: which results differ from one rank's."""
    group, device = resolve_group(tp_group), torch.device("cuda", torch.cuda.current_device())
    data = [x.contiguous() for x in tensors(device, torch.bfloat16, 1, of_q, of_k, 2048, 2048, 128)]
    options = dict(KINDS[kind]) if kind in KINDS else dict(causal=True, sinks=torch.ones(of_q, device=device))
    if kind == "packed":
        cu = torch.tensor([0, 700, 701, 2048], dtype=torch.int32, device=device)
        options = dict(causal=True, cu_seqlens_q=cu, max_seqlen_q=1400)
    whole, differ = attend(*data, **options), []
    runs = {"eager": on_ranks(data, group, **options)}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_ranks(data, group, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        runs["captured"] = on_ranks(data, group, **options)
    graph.replay()
    torch.cuda.synchronize()
    for how, results in runs.items():
        for name, x in results.items():
            if not torch.equal(
                x.contiguous().view(torch.int16), part_of(whole[name], group).contiguous().view(torch.int16)
            ):
                differ.append(f"{how}: {name}")
    return differ


@pytest.mark.gpu
@pytest.mark.skipif(gpu_ranks() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", (*KINDS, "sinks", "packed"))
@pytest.mark.parametrize("of_q, of_k", ((32, 8), (16, 1)))
def test_on_two_gpus(of_q, of_k, kind):
    assert run_on_gpus(on_gpus, 2, of_q, of_k, kind, device="cuda") == [[], []]
