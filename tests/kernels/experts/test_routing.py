"""Routing, Triton's and the CPU's: ties, sums over slots in order, and a token's bits do not depend on the others."""

from __future__ import annotations

import math
import re
from types import ModuleType

import pytest
import torch
from gpus import gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tp_invariant.kernels.experts import reference_routing, routing
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [routing] if DEVICE == "cuda" else [routing, reference_routing]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NAN, INF = math.nan, math.inf


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def kernels(request) -> ModuleType:
    return request.param


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return wide_randn(*shape, generator=generator, spread=spread).to(DEVICE, dtype)


# --- the k largest ----------------------------------------------------------------------------------------------------


def sorted_indices(scores: list[float], k: int) -> list[int]:
    """By Python's own stable sort: NaN first, then descending; -0.0 equals 0.0."""
    return sorted(range(len(scores)), key=lambda i: (not math.isnan(scores[i]), -scores[i]))[:k]


def check_top_k(kernels: ModuleType, scores: Tensor, k: int) -> None:
    values, indices = kernels.top_k(scores, k)
    assert values.dtype == scores.dtype and indices.dtype == torch.int64
    assert indices.tolist() == [sorted_indices(row, k) for row in scores.tolist()]
    wanted = scores.gather(1, indices)
    assert torch.equal(values.isnan(), wanted.isnan())
    assert_bitwise_equal(values.nan_to_num(7), wanted.nan_to_num(7))


@every_dtype
@pytest.mark.parametrize("experts, k", ((1, 1), (8, 2), (37, 37), (128, 8)))
def test_top_k_with_ties(kernels, experts, k, dtype):
    """Few different values, so that most are ties."""
    check_top_k(kernels, rand(5, experts, spread=0).round().to(dtype), k)
    check_top_k(kernels, torch.zeros(2, experts, dtype=dtype, device=DEVICE), k)
    check_top_k(kernels, rand(5, experts, dtype=dtype), k)


SPECIAL = [0.0, -0.0, NAN, INF, -INF, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38, 1.0, -1.0]


@settings(deadline=None, max_examples=25)
@given(row=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=20), data=st.data())
def test_top_k_of_special_values(row, data):
    k = data.draw(st.integers(1, len(row)))
    for kernels in KERNELS:
        check_top_k(kernels, torch.tensor([row], device=DEVICE), k)


def test_top_k_of_views(kernels):
    scores = rand(6, 4, 40)
    values, indices = kernels.top_k(scores, 3)
    assert values.shape == indices.shape == (6, 4, 3)
    transposed = scores.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    padded = torch.full((6, 4, 50), INF, device=DEVICE)
    padded[..., 3:43] = scores
    for view in (transposed, padded[..., 3:43], torch._neg_view(-scores)):
        assert_bitwise_equal(list(kernels.top_k(view, 3)), [values, indices])
    for part in (slice(0, 1), slice(1, 6, 2), slice(0, 0)):
        assert_bitwise_equal(list(kernels.top_k(scores[part], 3)), [values[part].clone(), indices[part].clone()])


# --- combining --------------------------------------------------------------------------------------------------------


def routing_of(tokens: int, slots: int) -> tuple[Tensor, Tensor]:
    """places [T, k], and order [R], their inverse."""
    order = torch.randperm(tokens * slots, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return order.argsort().view(tokens, slots), order


def case(tokens: int, slots: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """rows [R, H], weights [T, k], dy [T, H]."""
    return rand(tokens * slots, h, dtype=dtype), rand(tokens, slots, seed=1), rand(tokens, h, dtype=dtype, seed=2)


def in_slot_order(terms: Tensor, order: range) -> Tensor:
    """terms [T, k, H] in fp32, added one after another."""
    total = terms[:, order[0]]
    for slot in order[1:]:
        total = total + terms[:, slot]
    return total


@every_dtype
@pytest.mark.parametrize("tokens, slots, h", ((5, 1, 40), (9, 4, 300), (1, 8, 33)))
def test_slots_are_added_in_their_order(kernels, tokens, slots, h, dtype):
    """The bytes of torch's operations one by one. The control: from the last slot on, other bits."""
    (rows, weights, _), (places, _) = case(tokens, slots, h, dtype), routing_of(tokens, slots)
    for factors in (weights, weights.to(dtype), None):
        terms = rows[places].float() * (1.0 if factors is None else factors.float().unsqueeze(-1))
        y = kernels.combine(rows, factors, places)
        assert y.is_contiguous()
        assert_bitwise_equal(y, in_slot_order(terms, range(slots)).to(dtype))
        if slots > 2 and dtype == torch.float32:
            assert not torch.equal(in_slot_order(terms, range(slots)[::-1]), y)


@every_dtype
def test_against_autograd_in_float64(kernels, dtype):
    tokens, slots, h = 7, 4, 90
    (rows, weights, dy), (places, order) = case(tokens, slots, h, dtype), routing_of(tokens, slots)
    rows64, weights64 = rows.double().requires_grad_(), weights.double().requires_grad_()
    y64 = (rows64[places] * weights64.unsqueeze(-1)).sum(1)
    y64.backward(dy.double())
    unit = torch.finfo(dtype).eps / 2 + slots * 2.0**-23
    y, drows = kernels.combine(rows, weights, places), kernels.combine_backward_rows(dy, weights, order)
    assert drows.dtype == dtype
    for got, exact in ((y, y64), (drows, rows64.grad)):
        assert (got.double() - exact).norm() <= unit * exact.norm()
    dweights = kernels.combine_backward_weights(dy, rows, places)
    terms = (rows64.detach()[places] * dy.double().unsqueeze(1)).abs().sum(-1)
    assert dweights.dtype == torch.float32
    assert ((dweights.double() - weights64.grad).abs() <= 10 * 2.0**-24 * terms).all()  # about log2(h) roundings


@every_dtype
@pytest.mark.parametrize("tokens, slots, h", ((5, 1, 40), (9, 4, 2048), (3, 8, 33), (2, 2, 9000)))
def test_both_gradients_of_the_sum_at_once(kernels, tokens, slots, h, dtype):
    """The bytes that each has by itself, also where other tensors lie at other addresses."""
    (rows, weights, dy), (places, order) = case(tokens, slots, h, dtype), routing_of(tokens, slots)
    padded = torch.full((tokens * slots, h + 3), NAN, device=DEVICE, dtype=dtype)
    padded[:, 1:-2] = rows
    for factors in (weights, weights.to(dtype)):
        wanted = [
            kernels.combine_backward_rows(dy, factors, order), kernels.combine_backward_weights(dy, rows, places)
        ]  # fmt: skip
        for view in (rows, padded[:, 1:-2], rows.t().contiguous().t()):
            assert_bitwise_equal(list(kernels.combine_backward(dy, factors, view, places)), wanted)


@every_dtype
def test_gathered_rows_and_their_gradients(kernels, dtype):
    tokens, slots, h = 6, 3, 50
    x, (places, order) = rand(tokens, h, dtype=dtype), routing_of(tokens, slots)
    rows = kernels.gather_rows(x, order, slots)
    assert_bitwise_equal(rows[places], x.unsqueeze(1).expand(-1, slots, -1).contiguous())
    for view in (x, x.t().contiguous().t()):
        assert_bitwise_equal(kernels.spread_rows(view, places), rows)
    assert_bitwise_equal(kernels.gather_rows(x.t().contiguous().t()[:, :7], order, slots), rows[:, :7].contiguous())
    drows = rand(tokens * slots, h, dtype=dtype, seed=3)
    ones = torch.ones(tokens, slots, device=DEVICE)
    assert_bitwise_equal(kernels.combine(drows, None, places), kernels.combine(drows, ones, places))
    exact = drows.double()[places].sum(1)
    error = (kernels.combine(drows, None, places).double() - exact).norm()
    assert error <= (torch.finfo(dtype).eps / 2 + slots * 2.0**-23) * exact.norm()


def everything(kernels: ModuleType, rows: Tensor, weights: Tensor, dy: Tensor, places: Tensor) -> list[Tensor]:
    """Each of the first dim T."""
    t, slots = places.shape
    order = torch.arange(t * slots, device=DEVICE)
    drows = kernels.combine_backward_rows(dy, weights, order).view(t, slots, dy.shape[1])
    dots = kernels.combine_backward_weights(dy, rows, places)
    return [kernels.combine(rows, weights, places), kernels.combine(rows, None, places), drows, dots]


def check_tokens_alone(kernels: ModuleType, tokens: int, slots: int, h: int, dtype: torch.dtype, parts) -> None:
    (rows, weights, dy), (places, _) = case(tokens, slots, h, dtype), routing_of(tokens, slots)
    whole = everything(kernels, rows, weights, dy, places)
    padded = torch.full((tokens * slots, h + 3), NAN, device=DEVICE, dtype=dtype)
    padded[:, 1:-2] = rows  # every row at another alignment
    for part in parts:
        wanted = [x[part].clone(memory_format=torch.contiguous_format) for x in whole]
        for view in (rows, padded[:, 1:-2]):
            got = everything(kernels, view, weights[part], dy[part], places[part])
            assert_bitwise_equal(got, wanted, f"{part}")
        own = rows[places[part].reshape(-1)]  # the rows of these tokens alone, in another order
        there = torch.arange(own.shape[0], device=DEVICE).view(-1, slots)
        got = everything(kernels, own, weights[part], dy[part], there)
        assert_bitwise_equal(got, wanted, f"{part}, in another order")
    transposed = rows.t().contiguous().t(), weights.t().contiguous().t(), dy.t().contiguous().t()
    assert_bitwise_equal(everything(kernels, *transposed, places), whole, "transposed")


@every_dtype
def test_tokens_have_the_bits_that_they_have_alone(kernels, dtype):
    for slots, h in ((3, 48), (2, 33)):
        check_tokens_alone(kernels, 5, slots, h, dtype, (slice(0, 1), slice(1, 5, 2), slice(0, 0)))


@gpu
@every_dtype
@pytest.mark.parametrize("h", (1, 7, 2048, 2880, 4096, 7168, 20000))
def test_tokens_on_a_gpu(dtype, h):
    """The order of a dot product's sum exists on a GPU only."""
    check_tokens_alone(routing, 600, 8, h, dtype, (slice(0, 1), slice(599, 600), slice(3, 500, 7), slice(0, 128)))


@gpu
def test_top_k_on_a_gpu():
    for dtype in DTYPES:
        for experts, k in ((128, 8), (256, 8), (32, 4), (8, 2), (1000, 10)):
            check_top_k(routing, rand(500, experts, spread=0).mul(4).round().to(dtype), k)


def test_lone_terms_keep_their_bits(kernels):
    """With one slot nothing is added: -0.0 stays."""
    rows = torch.tensor([[-0.0, 1.0, -INF, 2.0**-149]], device=DEVICE)
    place = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    assert_bitwise_equal(kernels.combine(rows, None, place), rows)


@pytest.mark.parametrize(
    "error, message, dtype, k",
    (
        (TypeError, "top_k: scores has dtype torch.float64; allowed: torch.bfloat16, torch.float16", torch.float64, 2),
        (ValueError, "top_k: k is 9; allowed: an int from 1 to the 8 scores of a token", torch.float32, 9),
    ),
)
def test_what_is_refused(kernels, error, message, dtype, k):
    with pytest.raises(error, match=re.escape(message)):
        kernels.top_k(torch.ones(4, 8, device=DEVICE, dtype=dtype), k)


@pytest.mark.parametrize("tokens, slots, experts", ((21, 8, 12), (5, 1, 3), (1, 3, 3), (0, 4, 9)))
def test_chosen_weights_and_their_gradient(kernels, tokens, slots, experts):
    """The bytes of torch's operations one by one, in the order of slots. The control: from the last slot on, others."""
    scores, dweights = rand(tokens, experts).abs(), rand(tokens, slots, seed=1)
    corrected = scores + rand(1, experts, seed=2)
    for choice, normalize, epsilon, scale, dtype in (
        (scores, True, 0.0, 1.0, torch.bfloat16),
        (corrected, True, 1e-20, 2.5, torch.float32),
        (corrected.t().contiguous().t(), False, 0.0, 0.3, torch.float16),
        (scores, True, 0.1, 1.0, torch.float32),
    ):
        options = dict(normalize=normalize, epsilon=epsilon, scale=scale, out_dtype=dtype)
        weights, index, y, total = kernels.choose(scores, choice, slots, **options)
        assert_bitwise_equal(index, kernels.top_k(choice, slots)[1])
        wanted = chosen = scores.gather(1, index)
        if normalize:
            sums = in_slot_order(chosen.unsqueeze(-1), range(slots)).squeeze(-1) + epsilon
            assert_bitwise_equal(total, sums)
            wanted = chosen / sums.unsqueeze(1)
        assert_bitwise_equal([weights, y], [(wanted * scale).to(dtype), wanted])
        dy = dweights.to(dtype)
        got = kernels.choose_backward(dy.t().contiguous().t(), index, y, total, experts=experts, scale=scale)
        dy = dy.float() * scale
        if normalize:
            dy = (dy - in_slot_order((dy * y).unsqueeze(-1), range(slots))) / total.unsqueeze(1)
        assert_bitwise_equal(got, torch.zeros_like(scores).scatter(1, index, dy))
    if tokens > 20:
        assert not torch.equal(in_slot_order(chosen.unsqueeze(-1), range(slots)[::-1]).squeeze(-1) + 0.1, total)
    exact = chosen.double().requires_grad_()
    (exact / (exact.sum(1, keepdim=True) + 0.1)).backward(dweights.double())
    assert (got.gather(1, index).double() - exact.grad).norm() <= 1e-5 * exact.grad.norm()


@pytest.mark.parametrize(
    "tokens, slots, experts, dtype",
    [*((*sizes, torch.int64) for sizes in ((1, 1, 1), (700, 8, 128), (40, 4, 512), (9, 3, 600), (0, 2, 5))),
     *((33, 2, 3, dtype) for dtype in (torch.int32, torch.int64))],
)  # fmt: skip
def test_rows_are_sorted_by_expert_token_and_slot(kernels, tokens, slots, experts, dtype):
    """Python's stable sort. In the first case all rows go to the last expert, and to few in another."""
    generator = torch.Generator().manual_seed(0)
    for chosen in (experts, 1, min(experts, 2)):
        index = experts - 1 - torch.randint(chosen, (tokens, slots), generator=generator)
        order, places, offsets = kernels.sort_by_expert(index.to(DEVICE, dtype), experts)
        flat = index.flatten().tolist()
        wanted = sorted(range(len(flat)), key=flat.__getitem__)
        assert order.dtype == places.dtype == torch.int64 and offsets.dtype == torch.int32
        assert order.tolist() == wanted and order[places.flatten()].tolist() == list(range(len(flat)))
        assert places.shape == (tokens, slots)
        assert offsets.tolist() == [sum(e < expert for e in flat) for expert in range(experts + 1)]


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_experts_that_are_views_of_wider_tensors(kernels, dtype):
    """Those that reshape(-1) turns into a view with a stride above all, such as one column of several."""
    wide = torch.randint(8, (40, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    for index in (wide[:, :1], wide[:, 2:3], wide[:, ::2], wide[3:4, ::3], wide[:1, :1].expand(40, 1), wide.t()):
        got = kernels.sort_by_expert(index, 8)
        assert_bitwise_equal(list(got), list(kernels.sort_by_expert(index.contiguous(), 8)))
        by_expert = index.flatten()[got[0]]
        assert_bitwise_equal(by_expert, index.flatten().sort().values)
    assert not torch.equal(kernels.sort_by_expert(wide[:, :1], 8)[0], kernels.sort_by_expert(wide[:, 1:2], 8)[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion that fails on the device ends the process's use of it")
@pytest.mark.parametrize("bad", (-1, 8, 2**32 + 3, -(2**32) + 3, 2**63 - 1))
def test_an_expert_that_does_not_exist_is_counted_with_no_other(bad):
    """Also where its lower 32 bits are an expert's. What is asserted on a GPU is that all rows are counted."""
    index = torch.full((5, 3), 3)
    index[2, 1] = bad
    *_, offsets = routing.sort_by_expert(index, 8)
    assert offsets.tolist() == [0] * 4 + [14] * 5


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion that fails on the device ends the process's use of it")
@pytest.mark.parametrize("bad", (-1, 600), ids=str)
def test_an_expert_that_does_not_exist(bad):
    """Where torch sorts. The interpreter leaves the kernel's assertion out: test_compile_kernels.py looks for it."""
    index = torch.zeros(3, 2, dtype=torch.int64)
    index[1, 1] = bad
    with pytest.raises((AssertionError, RuntimeError), match="expert that does not exist"):
        routing.sort_by_expert(index, 600)
