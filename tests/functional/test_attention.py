"""tpi.attention: a head's bits depend on its own data alone, a query's on itself and the keys; values; errors.

On a CPU the reference runs, with small sizes; on a GPU the Triton kernel, with large ones.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from attention_cases import ALL, KINDS, assert_same_bytes, attend, fresh, naively, part_of, plainly, tensors, visible
from gpus import gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tp_invariant as tpi
from tp_invariant.functional import attention_kernels

attention_module = sys.modules["tp_invariant.functional.attention"]  # tpi.attention is the function
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# device, dtype, head size
PLACES = [
    pytest.param("cpu", torch.float32, 24, id="cpu-fp32-24"),
    pytest.param("cpu", torch.bfloat16, 16, id="cpu-bf16-16"),
    *(
        pytest.param("cuda", dtype, dim, marks=GPU, id=f"cuda-{dtype}-{dim}")
        for dtype, dims in (
            (torch.bfloat16, (64, 96, 128, 256)),
            (torch.float16, (64, 96, 128, 256)),
            (torch.float32, (64,)),
            (torch.bfloat16, (80, 320)),
        )
        for dim in dims
    ),
]
BOTH = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=GPU, id="cuda")]


# --- bits: heads, batches, packing ----------------------------------------------------------------------------------


def sizes_for(device, dim):
    """batch, heads, kv heads, [(queries, keys)]"""
    if device == "cpu":
        return 2, 4, 2, ((1, 37), (150, 150), (40, 170))
    if dim > 256:  # plain torch
        return 2, 8, 4, ((300, 300),)
    long = ((4096, 4096), (8192, 8192)) if dim == 128 else ((2100, 2100),)
    return 2, 32, 8, ((1, 4096), (77, 77), (1000, 1000), (300, 4096), *long)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_heads_and_sequences_do_not_depend_on_each_other(device, dtype, dim, kind):
    batch, heads, kv_heads, lengths = sizes_for(device, dim)
    for queries, keys in lengths:
        q, k, v, grad = data = tensors(device, dtype, batch, heads, kv_heads, queries, keys, dim)
        whole = attend(*data, **KINDS[kind])
        where = f"{queries} queries, {keys} keys"
        assert_same_bytes(attend(*data, **KINDS[kind]), whole, f"the same call again, {where}")
        for dim_cut, parts in ((1, 2), (1, kv_heads), (0, batch)):
            for index in {0, parts - 1} if device == "cuda" else range(parts):
                mine = [fresh(x.chunk(parts, dim_cut)[index]) for x in data]
                expected = part_of(whole, dim_cut, index, parts)
                cut = f"part {index} of {parts} along dim {dim_cut}, {where}"
                assert_same_bytes(attend(*mine, **KINDS[kind]), expected, cut)
        # all heads of one key head, each query head by itself: out and dq are the same (dk and dv are sums over them)
        group = heads // kv_heads
        alone = attend(q[:, :1], k[:, :1], v[:, :1], grad[:, :1], **KINDS[kind])
        for name in ("out", "dq"):
            assert_same_bytes({name: alone[name]}, {name: whole[name][:, :1]}, f"one of {group} query heads, {where}")


@pytest.mark.parametrize("device, dtype, dim", [*PLACES[:3], *PLACES[4:6], PLACES[10]])
def test_one_key_head_and_all_options_at_once(device, dtype, dim):
    """Slices of query heads that share the one key head: out and dq; and of sequences. Window and softcap together."""
    queries, keys = (40, 170) if device == "cpu" else (100, 560)  # the window crosses chunks, and the control's cuts
    for kv_heads, options in ((1, KINDS["causal"]), (1, ALL), (2, ALL)):
        q, k, v, _ = data = tensors(device, dtype, 2, 4, kv_heads, queries, keys, dim, spread=0)
        whole, naive = attend(*data, **options), attend(*data, naively, **options)
        exact = attend(*(x.double() for x in data), plainly, **options)
        theirs = attend(*data, plainly, **options)
        for name, value in exact.items():
            errors = [float((x[name].double() - value).norm() / value.norm()) for x in (whole, theirs)]
            floor = (4 if device == "cpu" else 16) * torch.finfo(torch.float32).eps
            assert errors[0] <= max(1.2 * errors[1], floor), (name, kv_heads, errors)
        for part in range(2):
            of_heads = [fresh(x.chunk(2, 1)[part]) if x.shape[1] > 1 else x for x in data]
            got = attend(*of_heads, **options)
            names = whole if kv_heads > 1 else ("out", "dq")
            expected = part_of({name: whole[name] for name in names}, 1, part, 2)
            assert_same_bytes({name: got[name] for name in names}, expected, f"heads, {kv_heads} of keys, {options}")
            control = attend(*of_heads, naively, **options)
            assert all(not torch.equal(control[n], naive[n].chunk(2, 1)[part]) for n in ("out", "dq")), "the control"
            mine = [fresh(x[part : part + 1]) for x in data]
            assert_same_bytes(attend(*mine, **options), part_of(whole, 0, part, 2), f"sequence {part}, {options}")
        step = {"out": tpi.attention(fresh(q[:, :, -1:]), k, v, **options)}
        assert_same_bytes(step, {"out": whole["out"][:, :, -1:].contiguous()}, f"a decode step, {options}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_naive_attention_depends_on_other_heads_and_sequences(device, dtype, dim, kind):
    """The control, on the data of a case above: with fewer heads, sequences or queries all results differ."""
    data = tensors(device, dtype, 2, 4, 2, 150, 150, dim)
    whole = attend(*data, naively, **KINDS[kind])
    for dim_cut in (0, 1):
        half = attend(*(fresh(x.chunk(2, dim_cut)[0]) for x in data), naively, **KINDS[kind])
        assert all(not torch.equal(x, half[name]) for name, x in part_of(whole, dim_cut, 0, 2).items())
    q, k, v, _ = data
    for last in (20, 127, 149) if kind != "full" else ():
        alone = naively(q[:, :, last : last + 1], k[:, :, : last + 1], v[:, :, : last + 1], **KINDS[kind])
        assert not torch.equal(alone, whole["out"][:, :, last : last + 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_packed_sequences_are_separate_calls(device, dtype, dim, kind):
    scale = 1 if device == "cpu" else 16
    of_q = [scale * n for n in (30, 0, 9, 140)] + [1, 1]
    of_k = [scale * n for n in (30, 5, 60, 140)] + [1, 77]
    q, k, v, grad = tensors(device, dtype, 1, 4, 2, sum(of_q), sum(of_k), dim)
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device) for sizes in (of_q, of_k)
    )
    options = dict(KINDS[kind], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    packed = attend(q, k, v, grad, **options)
    longer = attend(q, k, v, grad, **options, max_seqlen_q=sum(of_q), max_seqlen_k=max(of_k))
    assert_same_bytes(longer, packed, "other longest lengths")
    for n in range(len(of_q)):
        of_queries, of_keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        mine = [fresh(x[:, :, s]) for x, s in ((q, of_queries), (k, of_keys), (v, of_keys), (grad, of_queries))]
        expected = {
            name: x[:, :, of_queries if name in ("out", "dq") else of_keys].contiguous() for name, x in packed.items()
        }
        assert_same_bytes(attend(*mine, **KINDS[kind]), expected, f"sequence {n}")
    # the control: two sequences as one call with a mask between them
    alone, both = (slice(0, stop) for stop in (30, 170))
    q, k, v = (torch.cat([x[:, :, :30], x[:, :, -140:]], dim=2) for x in (q, k, v))
    apart = torch.ones(both.stop, both.stop, dtype=torch.bool, device=device)
    apart[alone, 30:] = False
    masked = naively(q, k, v, hidden=~apart, **KINDS[kind])[:, :, alone]
    assert not torch.equal(masked, naively(q[:, :, alone], k[:, :, alone], v[:, :, alone], **KINDS[kind]))


# --- bits: a query, the other queries, and where keys are cut -------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_chunks_and_single_steps_are_the_prefill(device, dtype, dim, kind):
    length = 300 if device == "cpu" or dim > 256 else 4096
    q, k, v, _ = tensors(device, dtype, 2, 4, 2, length, length, dim)
    whole = {"out": tpi.attention(q, k, v, **KINDS[kind])}

    def part(start: int, stop: int, cache: int) -> None:
        """Queries start .. stop with keys 0 .. stop of a cache of `cache` keys."""
        keys, values = (F.pad(x, (0, 0, 0, cache - length), value=torch.nan)[:, :, :stop] for x in (k, v))
        got = {"out": tpi.attention(fresh(q[:, :, start:stop]), keys, values, **KINDS[kind])}
        expected = {"out": whole["out"][:, :, start:stop].contiguous()}
        assert_same_bytes(got, expected, f"queries {start} to {stop}")

    cuts = [0, 1, 64, 127, 128, 129, 200, length]
    for start, stop in itertools.pairwise(cuts):
        part(start, stop, length)
    for last in (*range(0, length, length // 8), *cuts[1:-1], length - 1):
        part(last, last + 1, length + 50)
    if "window" not in KINDS[kind]:
        only = {"out": tpi.attention(q[:, :, -1:], k, v, **{**KINDS[kind], "causal": False})}
        assert_same_bytes(only, {"out": whole["out"][:, :, -1:].contiguous()}, "causal or full, the last query")


@pytest.mark.parametrize("device, dtype, dim", PLACES[:1] + PLACES[2:4])
def test_other_chunks_of_keys_give_other_bits(device, dtype, dim):
    """The control: chunks counted from the first key of a window instead of from the sequence's."""
    q, k, v, _ = tensors(device, dtype, 1, 4, 2, 2500, 2500, dim)
    q, window, differ = q[:, :, -300:], 1700, 0
    whole = tpi.attention(q, k, v, causal=True, window=window)
    for i in range(0, 300, 50):
        stop = 2500 - 300 + i + 1
        seen = slice(stop - window, stop)
        alone = tpi.attention(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen])
        torch.testing.assert_close(alone, whole[:, :, i : i + 1], rtol=2e-2, atol=2e-2)
        differ += not torch.equal(alone, whole[:, :, i : i + 1])
    assert differ


def test_the_number_of_threads_changes_no_bit():
    data = tensors("cpu", torch.float32, 2, 8, 4, 150, 150, 24)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(attend(*data, causal=True, softcap=3.0))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        assert_same_bytes(got, results[0], "threads")


@gpu
def test_repeated_calls_beside_a_busy_stream():
    data = tensors("cuda", torch.bfloat16, 1, 32, 8, 4096, 4096, 128)
    first = attend(*data, causal=True)
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(10):
                a @ a
        assert_same_bytes(attend(*data, causal=True), first, "beside products of another stream")
    torch.cuda.synchronize()


@gpu
def test_decode_steps_of_two_streams():
    """The kernel that folds a step's chunks is launched before the one that computes them has ended: it must wait."""
    cases = [tensors("cuda", torch.bfloat16, batch, 8, 2, 1, keys, 128)[:3] for batch, keys in ((1, 5000), (16, 9000))]
    first = [tpi.attention(*case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append([tpi.attention(*case) for _ in range(10)])
        torch.cuda.synchronize()
        for expected, got in zip(first, results, strict=True):
            assert all(torch.equal(x.view(torch.int16), expected.view(torch.int16)) for x in got)


# --- values ---------------------------------------------------------------------------------------------------------


def torchs(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The formula with a softcap; flash or cuDNN if they support the case; otherwise SDPA with a mask."""
    if "softcap" in options:
        return plainly(q, k, v, **options)
    seen = visible(q.shape[2], k.shape[2], options, q.device)
    causal = options.get("causal", False) and q.shape[2] == k.shape[2]  # theirs puts the first query at the first key
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))  # a fused kernel with a mask wants that
    if (
        q.is_cuda
        and q.dtype != torch.float32
        and q.shape[-1] <= 256
        and (causal or not options)
        and "window" not in options
    ):
        with torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.parametrize("kind", [*KINDS, "slight cap"])
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_error_against_float64(device, dtype, dim, kind):
    """At most 1.2 times that of torch's fused kernels over all lengths, or a few units in fp32's last place.

    In fp32 on a GPU a sum over keys is one chain of 2000 multiply-adds; torch has no fused kernel for it to measure by.
    """
    options = KINDS.get(kind, dict(softcap=50.0, scale=0.02))  # scores far below the cap, which bends them hardly
    lengths = ((1, 1), (150, 150), (40, 170), (7, 3)) if device == "cpu" else ((1, 2000), (700, 1500), (900, 900))
    for kv_heads in (2, 1):
        squares: dict[str, list[float]] = {}  # of the exact values, of our errors, of theirs
        for queries, keys in lengths:
            data = tensors(device, dtype, 2, 4, kv_heads, queries, keys, dim, spread=0)
            exact = attend(*(x.double() for x in data), plainly, **options)
            theirs, ours = attend(*data, torchs, **options), attend(*data, **options)
            for name, value in exact.items():
                assert ours[name].dtype == dtype and ours[name].isfinite().all()
                found = (value, ours[name].double() - value, theirs[name].double() - value)
                before = squares.get(name, [0.0, 0.0, 0.0])
                squares[name] = [one + float(x.square().sum()) for one, x in zip(before, found, strict=True)]
        for name, (size, our_error, their_error) in squares.items():
            errors = [(error / size) ** 0.5 for error in (our_error, their_error)]
            floor = (4 if device == "cpu" else 16) * torch.finfo(torch.float32).eps
            assert errors[0] <= max(1.2 * errors[1], floor), (name, kv_heads, errors)


@pytest.mark.parametrize("device", BOTH)
def test_a_query_that_sees_no_key_gives_zeros(device):
    q, k, v, grad = tensors(device, torch.float32, 2, 4, 2, 7, 3, 16)
    results = attend(q, k, v, grad, causal=True)  # queries 0 to 3 stand before the first key
    assert_same_bytes({"out": results["out"][:, :, :4]}, {"out": torch.zeros(2, 4, 4, 16, device=device)}, "zeros")
    assert_same_bytes({"dq": results["dq"][:, :, :4]}, {"dq": torch.zeros(2, 4, 4, 16, device=device)}, "zeros")
    assert results["out"][:, :, 4:].abs().min() > 0
    for shapes in (((0, 4, 3), (0, 2, 3)), ((2, 4, 0), (2, 2, 3)), ((2, 4, 3), (2, 2, 0))):
        q, k, v = (torch.randn(*shape, 8, device=device) for shape in (shapes[0], shapes[1], shapes[1]))
        for name, x in attend(q, k, v, torch.ones_like(q), causal=True).items():
            assert not x.any(), name


@pytest.mark.parametrize("device", BOTH)
def test_values_that_are_not_finite_stay_in_their_sequence(device):
    data = tensors(device, torch.float32, 1, 4, 2, 60, 60, 16)
    cu = torch.tensor([0, 13, 40, 60], dtype=torch.int32, device=device)
    options = dict(causal=True, cu_seqlens_q=cu, max_seqlen_q=27)
    clean = attend(*data, **options)
    for bad in (torch.nan, torch.inf):
        spoilt = [x.clone() for x in data]
        for x in spoilt:
            x[:, :, 13:40] = bad
        got = attend(*spoilt, **options)
        assert not got["out"][:, :, 13:40].isfinite().any()
        for part in (slice(0, 13), slice(40, 60)):
            of_part = [{name: x[:, :, part] for name, x in results.items()} for results in (got, clean)]
            assert_same_bytes(*of_part, f"beside {bad}")


@pytest.mark.parametrize("device", BOTH)
def test_an_infinite_value_may_spoil_queries_that_do_not_see_it(device):
    """As documented: all keys of a sequence must be finite. Blocks that a query does not see have no effect."""
    q, k, v, _ = tensors(device, torch.float32, 1, 4, 2, 300, 300, 16)
    clean = tpi.attention(q, k, v, causal=True)
    v[:, :, 280] = torch.inf
    got = tpi.attention(q, k, v, causal=True)
    assert_same_bytes({"out": got[:, :, :256]}, {"out": clean[:, :, :256]}, "before the block")
    assert got[:, :, 279].isnan().all() and not got[:, :, 280:].isfinite().any()


@pytest.mark.parametrize("device", BOTH)
def test_values_of_another_head_size(device):
    """v [.., E]: narrower, as in multi-head latent attention, or wider."""
    for wide, narrow in ((48, 32), (32, 48)):
        q, k, v, grad = tensors(device, torch.float32, 1, 4, 2, 40, 40, wide)
        v, grad = (F.pad(x, (0, max(narrow - wide, 0)))[..., :narrow] for x in (v, grad))
        ours, exact = attend(q, k, v, grad, causal=True), attend(q, k, v, grad, plainly, causal=True)
        for name, value in exact.items():
            assert ours[name].shape == value.shape
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("dim", [32, 20], ids=["a kernel's head size", "padded to one"])
@pytest.mark.parametrize("queries", [40, 1])
def test_results_have_the_memory_layout_that_layers_take(device, dim, queries):
    """A token's heads side by side, forward and backward, so that layers need no copy. No result is a view."""
    q, k, v, grad = tensors(device, torch.float32, 2, 4, 2, queries, 40, dim)
    results = attend(q, k, v, grad, causal=True)
    for name, x in results.items():
        assert x.transpose(1, 2).is_contiguous(), name
    with FakeTensorMode() as mode:
        fake = attend(*(mode.from_tensor(x) for x in (q, k, v, grad)), causal=True)
    for name, x in fake.items():
        assert x.stride() == results[name].stride(), f"{name}, a fake one"
    assert not tpi.attention(q, k, v, causal=True)._is_view()


def test_strides_change_no_bit():
    q, k, v, grad = data = tensors("cpu", torch.bfloat16, 1, 4, 2, 40, 40, 16)
    cu = torch.tensor([[0, 7], [30, 7], [40, 7]], dtype=torch.int32)[:, 0]
    packed = attend(*data, causal=True, cu_seqlens_q=cu.contiguous())
    assert_same_bytes(attend(*data, causal=True, cu_seqlens_q=cu), packed, "of cu_seqlens")
    q, k, v, grad = data = tensors("cpu", torch.bfloat16, 2, 4, 2, 40, 40, 16)
    whole = attend(*data, causal=True)
    strided = [x.mT.contiguous().mT for x in data]
    assert_same_bytes(attend(*strided, causal=True), whole, "transposed")
    one = torch.ones((), dtype=torch.bfloat16).expand_as(grad)  # the gradient of a sum
    assert_same_bytes(attend(q, k, v, one, causal=True), attend(q, k, v, one.contiguous(), causal=True), "expanded")


# --- as a node of a graph -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BOTH)
def test_compiled_whole_it_has_the_same_bits(device):
    data = tensors(device, torch.float32 if device == "cpu" else torch.bfloat16, 2, 8, 4, 40, 40, 64)
    compiled = torch.compile(
        lambda q, k, v: 2 * tpi.attention(q, k, v, causal=True, window=30),
        fullgraph=True,
        backend="aot_eager" if device == "cpu" else "inductor",
    )
    eager = attend(*data, lambda q, k, v: 2 * tpi.attention(q, k, v, causal=True, window=30))
    assert_same_bytes(attend(*data, compiled), eager, "compiled")
    packed = torch.compile(
        lambda q, k, v, cu: tpi.attention(q, k, v, causal=True, cu_seqlens_q=cu), fullgraph=True, backend="aot_eager"
    )
    one, cu = [x[:1] for x in data], torch.tensor([0, 13, 40], dtype=torch.int32, device=device)
    expected = attend(*one, causal=True, cu_seqlens_q=cu)
    assert_same_bytes(attend(*one, lambda q, k, v: packed(q, k, v, cu)), expected, "compiled, packed")


@pytest.mark.parametrize("device", BOTH)
def test_selective_checkpointing_sees_the_operator(device, monkeypatch):
    """Its result is saved, so forward runs once; without selective checkpointing no operator runs."""
    data = tensors(device, torch.float32 if device == "cpu" else torch.bfloat16, 1, 4, 2, 40, 40, 64)
    kernel, runs = attention_kernels.kernel_for(data[0]), []
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *args: runs.append(0) or forward(*args))

    def policy(context, op, *args, **options):
        ours = op is torch.ops.tp_invariant.attention.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*tensors, **options):
        return checkpoint(lambda *x: tpi.attention(*x, causal=True) * 1, *tensors, use_reentrant=False, **options)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    got = attend(*data, functools.partial(checkpointed, context_fn=contexts))
    assert len(runs) == 1
    assert_same_bytes(attend(*data, checkpointed), got, "recomputed")
    assert len(runs) == 3
    monkeypatch.setattr(attention_module, "_operator", None)
    assert_same_bytes(attend(*data, causal=True), got, "unwatched")


def test_graphs_and_fake_tensors_hold_the_operator(monkeypatch):
    """No kernel runs: for a fake CUDA tensor it would read memory at address 0."""
    data = [x[:1] for x in tensors("cpu", torch.float32, 2, 4, 2, 40, 40, 16)[:3]]
    cu = torch.tensor([0, 13, 40], dtype=torch.int32)
    expected = tpi.attention(*data, causal=True)
    for mode in ("real", "fake", "symbolic"):
        made = make_fx(lambda *x: tpi.attention(*x, causal=True), tracing_mode=mode)(*(x + 1 for x in data))
        assert torch.ops.tp_invariant.attention.default in [node.target for node in made.graph.nodes]
        assert_same_bytes({"out": made(*data)}, {"out": expected}, mode)
    monkeypatch.setattr(attention_kernels, "kernel_for", None)
    for options in (dict(causal=True), dict(cu_seqlens_q=cu), dict(cu_seqlens_q=cu, max_seqlen_q=27)):
        with FakeTensorMode() as fakes:
            fake = {name: fakes.from_tensor(x) if isinstance(x, Tensor) else x for name, x in options.items()}
            q, k, v = (fakes.from_tensor(x).requires_grad_() for x in data)
            out = tpi.attention(q, k, v, **fake)
            (dk,) = torch.autograd.grad(out.sum(), k)
            assert out.shape == q.shape and dk.shape == k.shape
        assert tpi.attention(q, k, v, **fake).shape == q.shape  # outside of the mode too
    with FakeTensorMode():
        q = torch.empty(1, 4, 40, 64, device="cuda", dtype=torch.bfloat16)
        assert tpi.attention(q, q, q, causal=True).device.type == "cuda"


@gpu
@pytest.mark.parametrize(
    "queries, keys, packed", [(300, 300, False), (300, 300, True), (1, 5000, False)], ids=["", "packed", "decode"]
)
def test_replayed_from_a_cuda_graph_it_has_the_same_bits(queries, keys, packed):
    q, k, v, grad = data = tensors("cuda", torch.bfloat16, 1, 8, 2, queries, keys, 128)
    options = dict(causal=True)
    if packed:
        cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        options |= dict(cu_seqlens_q=cu, max_seqlen_q=200)
    eager = attend(*data, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            attend(*data, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, grad, **options)
    for x in captured.values():
        x.zero_()
    graph.replay()
    assert_same_bytes(captured, eager, "replayed")


@pytest.mark.parametrize("device", BOTH)
def test_autocasts_dtype_wins(device):
    q, k, v, grad = tensors(device, torch.float32, 1, 4, 2, 20, 20, 64)
    with torch.autocast(device, torch.bfloat16):
        got = attend(q, k, v.bfloat16(), grad, causal=True)
    expected = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), grad.bfloat16(), causal=True)
    assert got["dq"].dtype == torch.float32
    assert_same_bytes({name: x.bfloat16() for name, x in got.items()}, expected, "autocast")


# --- what is refused ------------------------------------------------------------------------------------------------

CU = torch.tensor([0, 3, 6], dtype=torch.int32)
Q = torch.zeros(1, 4, 6, 8)
KV = torch.zeros(1, 2, 6, 8)
REFUSED = [
    (dict(q=Q[0]), ValueError, r"q \(4, 6, 8\), k .* must be \[batch, heads, sequence, head size\]"),
    (dict(k=KV[:, :, :5]), ValueError, "k and v the same heads and sequence"),
    (dict(q=Q[:, :3]), ValueError, "q has 3 heads and k 2: both must be at least 1, and q's a multiple"),
    (
        dict(q=Q.double()),
        TypeError,
        r"q is torch\.float64: attention takes torch\.bfloat16, torch\.float16, torch\.float32",
    ),
    (dict(v=KV.bfloat16()), TypeError, r"q is torch\.float32 and v is torch\.bfloat16: they must have the same dtype"),
    (dict(q=Q[..., :0], k=KV[..., :0]), ValueError, "heads of size 0"),
    (dict(q=Q.to("meta"), k=KV.to("meta"), v=KV.to("meta")), NotImplementedError, "attention runs on cuda and cpu"),
    (dict(k=KV.to("meta")), ValueError, "q is on cpu and k on meta"),
    (dict(window=3), ValueError, "window=3 with causal=False: a window is at least 1 and needs causal=True"),
    (dict(softcap=0.0), ValueError, r"softcap=0\.0 must be positive and finite, or None"),
    (dict(scale=float("inf")), ValueError, "scale=inf must be finite"),
    (dict(scale=torch.tensor(0.5)), TypeError, "scale is a tensor: it must be float or None, and gets no gradient"),
    (dict(window=2.5, causal=True), ValueError, r"window=2\.5 must be a whole number"),
    (dict(window="5", causal=True), TypeError, "window='5' is a str: it must be int or None"),
    (dict(causal=torch.tensor(True)), TypeError, "causal is a Tensor: it must be True or False"),
    (dict(k=None), TypeError, "q, k and v are Tensor, NoneType, Tensor: they must be tensors"),
    (dict(cu_seqlens_q=[0, 3, 6]), TypeError, "cu_seqlens_q is a list: it must be an int32 tensor"),
    (dict(q=Q[:, :, :5], cu_seqlens_q=CU), ValueError, "q has 5 tokens and k 6: packed sequences need cu_seqlens_k"),
    (dict(cu_seqlens_k=CU), ValueError, "cu_seqlens_k is given and cu_seqlens_q is not"),
    (dict(cu_seqlens_q=CU.long()), ValueError, r"cu_seqlens_q is torch\.int64 \(3,\) on cpu: it must be int32"),
    (
        dict(cu_seqlens_q=CU, cu_seqlens_k=CU[::2]),
        ValueError,
        r"cu_seqlens_q \(3,\) and cu_seqlens_k \(2,\) must have the same shape",
    ),
    (dict(cu_seqlens_q=CU[:2]), ValueError, r"cu_seqlens_q=\[0, 3\] must rise from 0 to 6"),
    (
        dict(cu_seqlens_q=CU, max_seqlen_q=2),
        ValueError,
        "max_seqlen_q=2 is less than the longest sequence: pass at least 3",
    ),
    (
        dict(q=Q.expand(2, -1, -1, -1), k=KV.expand(2, -1, -1, -1), v=KV.expand(2, -1, -1, -1), cu_seqlens_q=CU),
        ValueError,
        "q has batch 2: packed sequences",
    ),
]


@pytest.mark.parametrize("given, error, text", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        tpi.attention(**{"q": Q, "k": KV, "v": KV, **given})


def test_a_window_longer_than_any_sequence_is_none():
    data = tensors("cpu", torch.float32, 1, 4, 2, 7, 40, 16)
    assert_same_bytes(attend(*data, causal=True, window=10**30), attend(*data, causal=True), "a window of 10**30")


@pytest.mark.parametrize("device", BOTH)
def test_forward_mode_derivatives_are_refused(device):
    q, k, v, _ = tensors(device, torch.float32, 1, 4, 2, 5, 5, 8)
    with torch.autograd.forward_ad.dual_level():
        for given in ((q, k, v), (q, k, v.clone().requires_grad_())):
            dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(q))
            with pytest.raises((RuntimeError, NotImplementedError), match=r"forward mode AD|jvp"):
                tpi.attention(dual, *given[1:])
        assert_same_bytes({"out": tpi.attention(q, k, v)}, {"out": attend(q, k, v, q)["out"]}, "no tangents")


BAD_LENGTHS = """
import torch, tp_invariant as tpi
cu = torch.tensor({cu}, dtype=torch.int32, device="cuda")
x = torch.zeros(1, 2, 60, 64, dtype=torch.bfloat16, device="cuda")
tpi.attention(x, x, x, cu_seqlens_q=cu, max_seqlen_q={longest})
torch.cuda.synchronize()
"""


@gpu
@pytest.mark.parametrize(
    "cu, longest, right",
    [([0, 20, 60], 40, True), ([0, 20, 60], 39, False), ([0, 20, 50], 40, False), ([0, 30, 20, 60], 40, False)],
)
def test_wrong_lengths_are_found_on_the_device(cu, longest, right):
    """In a process of its own: the assertion makes the GPU unusable for the process."""
    code = BAD_LENGTHS.format(cu=cu, longest=longest)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode == 0) == right, ran.stderr
    assert right or "device-side assert" in ran.stderr


def test_a_second_derivative_is_refused():
    q, k, v, _ = (x.requires_grad_() for x in tensors("cpu", torch.float32, 1, 4, 2, 5, 5, 8))
    (dq,) = torch.autograd.grad(tpi.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative: call backward without create_graph=True"):
        dq.sum().backward()
