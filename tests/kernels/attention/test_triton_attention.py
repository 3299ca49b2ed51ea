"""The Triton attention kernels in the interpreter, with small tiles: values; bits over heads, packing, chunks, steps.

In fp32 only, because the interpreter is wrong in bf16. tests/functional/test_attention.py runs the real tiles on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    KINDS,
    assert_same_bytes,
    attend,
    fresh,
    naively,
    paged_and_whole,
    part_of,
    plainly,
    tensors,
)  # fmt: skip
from cases import more

import tp_invariant as tpi
from tp_invariant.functional import attention_kernels
from tp_invariant.hugging_face.masks import VisibleKeys
from tp_invariant.hugging_face.masks import attend as attend_visible
from tp_invariant.kernels import plans
from tp_invariant.kernels.attention import backward as attention_backward
from tp_invariant.kernels.attention import forward as kernels
from tp_invariant.kernels.attention import reference, spec
from tp_invariant.kernels.attention.tiles import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter, on a CPU")
SMALL = {**KINDS, "window": dict(causal=True, window=20)}


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch):
    """tpi.attention by these kernels, with several tiles and chunks for a few keys."""
    monkeypatch.setattr(attention_kernels, "kernel_for", lambda q: kernels)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(kernels, "CHUNK", 32)
    monkeypatch.setattr(kernels, "_MERGE_WIDTH", 2)
    tile = Tile(16, 16, 4, 1)
    monkeypatch.setattr(kernels, "forward_tile", lambda *sizes: tile)
    monkeypatch.setattr(attention_backward, "backward_query_tile", lambda *sizes, **options: tile)
    monkeypatch.setattr(attention_backward, "backward_key_tiles", lambda *sizes, **options: ((tile, True, True),))
    yield


def data(queries, keys, heads=4, kv_heads=2, spread=2):
    return tensors("cpu", torch.float32, 1, heads, kv_heads, queries, keys, 16, spread=spread)


@pytest.mark.parametrize("kind", [*SMALL, "slight cap"])
@pytest.mark.parametrize("queries, keys, heads", [(20, 50, 2), (40, 20, 2), (2, 70, 4)], ids=str)
def test_values(queries, keys, heads, kind):
    """(2, 70) is split into chunks that another kernel folds."""
    options = SMALL.get(kind, dict(softcap=50.0, scale=0.02))
    case = data(queries, keys, heads, heads // 2, spread=0)
    exact = attend(*(x.double() for x in case), plainly, **options)
    theirs, ours = attend(*case, plainly, **options), attend(*case, **options)
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (ours, theirs)]
        assert errors[0] <= max(1.2 * errors[1], 4 * torch.finfo(torch.float32).eps), (name, errors)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)], ids=str)
def test_parts_of_the_gradients_of_keys(heads):
    """key_parts: added in head order they are dk and dv, and so are they of the reference."""
    q, k, v, dout = data(40, 40, *heads)
    groups = heads[0] // heads[1]
    of_call = spec.AttentionSpec(True, 0.3), None, None, None, False
    for module in (kernels, reference):
        out, lse = module.forward(q, k, v, *of_call[:2])
        whole = module.backward(dout, q, k, v, out, lse, *of_call)
        parts = module.backward(dout, q, k, v, out, lse, *of_call, True)
        assert_same_bytes({"dq": parts[0]}, {"dq": whole[0]}, "the queries'")
        for name, of_heads, summed in zip(("dk", "dv"), parts[1:3], whole[1:3], strict=True):
            assert of_heads.shape == q.shape and of_heads.dtype == torch.float32
            first, *others = of_heads.unflatten(1, (-1, groups)).unbind(2)
            assert_same_bytes({name: functools.reduce(torch.add, others, first)}, {name: summed}, module.__name__)


def with_sinks(heads, **options):
    return options | dict(sinks=torch.tensor([0.5, 4.0, -2.0, float("-inf")])[:heads].requires_grad_())


@pytest.mark.parametrize("kind", ["full", "window", "softcap"])
def test_sinks(kind):
    """Values, a decode step that another kernel folds, and half of the heads."""
    case = data(60, 60, spread=0)
    options = with_sinks(4, **SMALL[kind])
    exact = attend(*(x.double() for x in case), plainly, **options)
    theirs, ours = attend(*case, plainly, **options), attend(*case, **options)
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (ours, theirs)]
        assert errors[0] <= max(1.2 * errors[1], 8 * torch.finfo(torch.float32).eps), (name, errors)
    half = attend(*(fresh(x.chunk(2, 1)[0]) for x in case), **with_sinks(2, **SMALL[kind]))
    of_sinks = {"dsinks": half.pop("dsinks")}
    assert_same_bytes(of_sinks, {"dsinks": ours.pop("dsinks")[:2]}, "half of the heads")
    assert_same_bytes(half, part_of(ours, 1, 0, 2), "half of the heads")
    q, k, v, _ = case
    step = tpi.attention(fresh(q[:, :, -1:]), k, v, **options)
    assert_same_bytes({"out": step}, {"out": ours["out"][:, :, -1:]}, "a decode step")
    without = tpi.attention(q, k, v, **SMALL[kind])
    assert not torch.equal(without[:, :3], ours["out"][:, :3]) and torch.equal(without[:, 3], ours["out"][:, 3])


def masks(heads):
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(1, 4, 60, 60, generator=generator) * 8 - 4)[:, :heads]
    hidden = torch.rand(60, 60, generator=generator) < 0.4
    hidden[:, 16:33], hidden[0] = True, True
    return {
        "bool": ~hidden,
        "bias": values.masked_fill(hidden, -torch.inf).requires_grad_(),
        "of keys": values[:, :, :1].detach().requires_grad_(),
        "in 16 bit": values[0].bfloat16().requires_grad_(),
    }


@pytest.mark.parametrize(
    "kind, mask",
    [
        *(("full", mask) for mask in masks(4)),
        ("window", "bias"),
        ("softcap", "bool"),
        more("window", "bool"),
        more("softcap", "bias"),
    ],
)
def test_masks(kind, mask):
    """Values, half of the heads, and a decode step that another kernel folds."""
    case, given = data(60, 60, spread=0), masks(4)[mask]
    options = SMALL[kind] | dict(mask=given)
    as_64 = given if given.dtype == torch.bool else given.detach().double().requires_grad_()
    exact = attend(*(x.double() for x in case), plainly, **SMALL[kind], mask=as_64)
    ours = attend(*case, **options)
    theirs = attend(
        *case, plainly, **SMALL[kind], mask=as_64.detach().float().requires_grad_() if "dmask" in ours else given
    )
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (ours, theirs)]
        floor = torch.finfo(ours[name].dtype).eps
        assert errors[0] <= max(1.2 * errors[1], 16 * floor if floor < 1e-6 else floor), (name, errors)
    half = attend(*(fresh(x.chunk(2, 1)[0]) for x in case), **SMALL[kind] | dict(mask=masks(2)[mask]))
    if "dmask" in half:
        expected = ours.pop("dmask")[..., :2, :, :]
        assert_same_bytes({"dmask": half.pop("dmask")}, {"dmask": expected}, "half of the heads")
    assert_same_bytes(half, part_of(ours, 1, 0, 2), "half of the heads")
    q, k, v, _ = case
    for at in (0, 59):
        own = given if given.shape[-2] == 1 else given[..., at : at + 1, :]
        stop = at + 1 if kind != "full" else 60
        step = tpi.attention(
            fresh(q[:, :, at : at + 1]), k[:, :, :stop], v[:, :, :stop],
            **options | dict(mask=own if own.shape[-1] == 1 else own[..., :stop]),
        )  # fmt: skip
        assert_same_bytes({"out": step}, {"out": ours["out"][:, :, at : at + 1]}, "a decode step")


@pytest.mark.parametrize("dim, of_values", [(24, 16), (16, 24), (20, 20), (18, 18)])
def test_head_sizes(dim, of_values):
    """Those of keys and values may differ; 20 and 24 are read in place, 18 is padded, since its rows do not align."""
    q, k, v, grad = tensors("cpu", torch.float32, 1, 4, 2, 20, 40, 24, spread=0)
    case = q[..., :dim], k[..., :dim], v[..., :of_values], grad[..., :of_values]
    for x, size in ((q, dim), (k, dim), (v, of_values), (grad, of_values)):
        x[..., size:] = torch.nan
    ours, exact = attend(*case, causal=True), attend(*(x.double() for x in case), plainly, causal=True)
    for name, value in exact.items():
        assert ours[name].shape == value.shape
        error = float((ours[name].double() - value).norm() / value.norm())
        assert error <= 8 * torch.finfo(torch.float32).eps, (name, error)
    half = attend(*(fresh(x.chunk(2, 1)[1]) for x in case), causal=True)
    assert_same_bytes(half, part_of(ours, 1, 1, 2), "half of the heads")


@pytest.mark.parametrize("kind", ["window", "bool", "bias"])
def test_a_cache_that_has_dropped_keys(monkeypatch, kind):
    """A decode step, whose chunks another kernel folds, and several queries; the control tells no position.

    The window is also given as a matrix, as transformers' caches have it where their mask is not recognised.
    """
    monkeypatch.setattr(spec, "CHUNK", 32)
    q, k, v, _ = data(100, 100)
    options = dict(sinks=torch.ones(4))
    seen = torch.ones(100, 100, dtype=torch.bool).tril().triu(-19)
    matrix = seen if kind == "bool" else torch.where(seen, torch.randn(100, 100), -torch.inf)
    window = dict(causal=True, window=20)
    whole, differ = tpi.attention(q, k, v, **options, **(window if kind == "window" else dict(mask=matrix))), 0
    for start, stop, first in ((99, 100, 80), (70, 71, 37), (60, 90, 41), (35, 36, 16)):
        mine, (k_now, v_now) = fresh(q[:, :, start:stop]), (fresh(x[:, :, first:stop]) for x in (k, v))
        if kind == "window":
            got = tpi.attention(mine, k_now, v_now, **options, **window, first_key=first)
            control = tpi.attention(mine, k_now, v_now, **options, **window)
        else:
            part = matrix[start:stop, first:stop]
            visible = VisibleKeys(False, None, stop - first, None, first, stop - first, part)
            got, control = (
                attend_visible(mine, k_now, v_now, x, **options) for x in (visible, replace(visible, first=0))
            )
        assert_same_bytes({"out": got}, {"out": whole[:, :, start:stop]}, f"from {first} to {stop}")
        differ += not torch.equal(control, got)
    assert differ


def test_packed_sequences_that_have_dropped_keys(monkeypatch):
    """In one call for steps, whose chunks another kernel folds, and with longer ones; neighbours have NaN."""
    monkeypatch.setattr(sys.modules["tp_invariant.functional.attention"], "CHUNK", 32)
    monkeypatch.setattr(attention_kernels, "CHUNK", 32)
    q, k, v, _ = data(100, 100)
    options = dict(causal=True, window=20)
    whole, differ = tpi.attention(q, k, v, **options), 0
    nothing = torch.full_like(k[:, :, :3], torch.nan)
    for steps in (((99, 100, 80), (70, 71, 37), (35, 36, 16)), ((60, 90, 41), (99, 100, 80), (0, 30, 0))):
        packed_q = torch.cat([q[:, :, start:stop] for start, stop, _ in steps], 2)

        packed_k = torch.cat([x for _, stop, first in steps for x in (k[:, :, first:stop], nothing)], 2)
        packed_v = torch.cat([x for _, stop, first in steps for x in (v[:, :, first:stop], nothing)], 2)
        of_q = [x for start, stop, _ in steps for x in (stop - start, 0)]  # NaN are sequences without queries
        of_k = [x for _, stop, first in steps for x in (stop - first, 3)]
        cu_q, cu_k = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (of_q, of_k))
        firsts = torch.tensor([x for _, _, first in steps for x in (first, 0)], dtype=torch.int32)
        own = options | dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_k=64)
        got = tpi.attention(packed_q, packed_k, packed_v, first_key=firsts, **own)
        expected = torch.cat([whole[:, :, start:stop] for start, stop, _ in steps], 2)
        assert_same_bytes({"out": got}, {"out": expected}, f"{steps}")
        differ += not torch.equal(tpi.attention(packed_q, packed_k, packed_v, **own), expected)
    assert differ, "the control"


@pytest.mark.parametrize("kind, dim", [("causal", 20), ("window", 16)])
def test_pages_have_the_bits_of_one_tensor(kind, dim):
    """Steps, whose chunks another kernel folds, and longer ones; pages in any order, others have NaN."""
    q, k, v, _ = (x[..., :dim] for x in tensors("cpu", torch.float32, 1, 4, 2, 130, 130, 32))
    for steps in (((129, 130), (70, 71), (0, 1)), ((60, 90), (128, 130), (0, 33))):
        assert_same_bytes(*paged_and_whole(q, k, v, steps, 16, SMALL[kind]), f"{steps}")


@pytest.mark.parametrize("kind", [more("window"), "softcap"])
def test_heads_and_packed_sequences_are_separate_calls(kind):
    q, k, v, grad = case = data(30, 50)
    of_q, of_k = [0, 9, 10, 30], [0, 12, 15, 50]
    cu_q, cu_k = (torch.tensor(starts, dtype=torch.int32) for starts in (of_q, of_k))
    packed = attend(*case, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **SMALL[kind])
    half = attend(
        *(fresh(x.chunk(2, 1)[1]) for x in case), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_k=50, **SMALL[kind]
    )
    assert_same_bytes(half, part_of(packed, 1, 1, 2), "half of the heads")
    spoilt = [x.clone() for x in case]
    for x, neighbours in zip(spoilt, (slice(10, 30), slice(15, 50), slice(15, 50), slice(10, 30)), strict=True):
        x[:, :, neighbours] = torch.nan
    beside = attend(*spoilt, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **SMALL[kind])
    for queries, keys in zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True):
        queries, keys = slice(*queries), slice(*keys)
        mine = [fresh(x[:, :, s]) for x, s in ((q, queries), (k, keys), (v, keys), (grad, queries))]
        alone = attend(*mine, **SMALL[kind])
        for results, what in ((packed, "packed"), (beside, "beside NaN")):
            if results is packed or queries.start < 10:
                of_it = {n: x[:, :, queries if n in ("out", "dq") else keys] for n, x in results.items()}
                assert_same_bytes(of_it, alone, f"{what}, queries {queries}")
    whole, one = (attend(*(x[:, :heads] for x in case), naively, **SMALL[kind]) for heads in (4, 2))
    assert all(not torch.equal(one[n], whole[n][:, : one[n].shape[1]]) for n in ("out", "dq")), "the control"


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "full"])
def test_chunks_and_single_steps_are_the_prefill(kind):
    """Another kernel folds a decode step's chunks of keys than a prefill's."""
    q, k, v, _ = data(100, 100, 2, 1)
    whole, differ = tpi.attention(q, k, v, **SMALL[kind]), 0
    for start, stop in ((0, 1), (31, 33), (63, 65), (40, 44), (99, 100), (70, 100)):
        mine = fresh(q[:, :, start:stop]), k[:, :, :stop], v[:, :, :stop]
        expected = {"out": whole[:, :, start:stop]}
        assert_same_bytes({"out": tpi.attention(*mine, **SMALL[kind])}, expected, f"queries {start} to {stop}")
        naive = naively(q, k, v, **SMALL[kind])[:, :, start:stop]
        differ += not torch.equal(naively(*mine, **SMALL[kind]), naive)
    assert differ >= 4, "the control"


def test_views_negated_by_a_flag_are_negated():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 20, 32), (1, 2, 20, 32), (1, 2, 20, 32), (1, 2, 20, 20), (2,)]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    dout = torch.randn(shapes[0], generator=generator)
    options = spec.AttentionSpec(causal=True, scale=0.2)

    def results(q, k, v, mask, sinks, dout):
        out, lse = kernels.forward(q, k, v, options, None, sinks, mask)
        return out, lse, *kernels.backward(dout, q, k, v, out, lse, options, None, sinks, mask, True)

    def negated(x):
        return torch._neg_view(-x)

    names = "out", "lse", "dq", "dk", "dv", "dsinks", "dmask"
    expected = dict(zip(names, results(*given, dout), strict=True))
    got = dict(zip(names, results(*map(negated, (*given, dout))), strict=True))
    assert_same_bytes(got, expected, "negated views")
    with_wrong_sign = results(*given, -dout)  # a flag that is not seen gives this
    assert not torch.equal(with_wrong_sign[2], expected["dq"])
