"""The products by expert by TMA have the bytes of the dense product of each expert's rows, and nothing leaks.

Without a GPU Triton's interpreter runs the kernels that have one, which tests the logic, bounds included; bytes are
compared on a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from matmul_cases import HOPPER, on_hopper
from torch import Tensor

from tp_invariant.kernels.experts import grouped, grouped_tma
from tp_invariant.kernels.experts.grouped_tma import GroupedTile
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if HOPPER else "cpu"
NAN, INF = math.nan, math.inf
# the tiles that the rules give, and others
ROWS_TILES = [
    *{grouped_tma.rows_tile(8 * average, 8, 2): None for average in range(17, 200)},
    GroupedTile(128, 128, 64, 4, 3, programs=2, ahead=False),
    GroupedTile(64, 256, 64, 4, 2, programs=2),
    GroupedTile(128, 256, 64, 8, 3, halves=False, group_m=1),
]
OUTER_TILES = [
    *{grouped_tma.outer_tile(512, 512, 8 * average, 8, 2): None for average in range(1, 2000, 7)},
    GroupedTile(128, 256, 64, 8, 4, ahead=False),
    GroupedTile(64, 256, 64, 4, 2, programs=2, ahead=False),
    GroupedTile(128, 256, 32, 8, 6, halves=False, group_m=1),
]
COUNTS = {  # the rows of each expert
    "some": (3, 0, 40, 1, 0, 333),
    "one has all": (0, 0, 130, 0),
    "one row": (1,),
    "the last of many": (0,) * 255 + (17,),
    "around a tile": (129, 64, 65, 127, 128, 0, 1, 63, 513, 40),
    "more than a program": (1, 2, 3) * 60,
}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return wide_randn(*shape, generator=torch.Generator().manual_seed(seed), spread=2).to(DEVICE, dtype)


def offsets_of(counts) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)


def slices_of(counts) -> list[slice]:
    return [slice(*ends) for ends in itertools.pairwise((0, *itertools.accumulate(counts)))]


def layouts(weight: Tensor) -> dict[str, Tensor]:
    """weight [E, K, N] in the ways of lying in memory that models have."""
    experts, k, n = weight.shape
    padded = torch.full((experts, k + 2, n + 16), NAN, device=DEVICE, dtype=weight.dtype)
    padded[:, 1:-1, 8:-8] = weight
    return {
        "rows": weight,
        "columns": weight.mT.contiguous().mT,
        "a part of a larger one": padded[:, 1:-1, 8:-8],
        "every second expert": weight.repeat_interleave(2, dim=0)[::2],
    }


# --- the interpreter --------------------------------------------------------------------------------------------------


@pytest.fixture
def addressable(monkeypatch):
    monkeypatch.setattr(grouped_tma, "supports_tma", lambda *args: True)


in_interpreter = pytest.mark.skipif(HOPPER, reason="the interpreter runs on machines without a GPU")
SMALL = (
    GroupedTile(16, 32, 32, 4, 2, ahead=False),
    GroupedTile(32, 16, 16, 4, 2, group_m=1, halves=False, programs=2, ahead=False),
    GroupedTile(64, 64, 64, 4, 2, group_m=3, ahead=False),
)


@in_interpreter
@pytest.mark.usefixtures("addressable")
@pytest.mark.parametrize(
    "tile, counts",  # every tile with experts of several tiles, one program's loop over them with the other divisions
    [*((tile, (3, 0, 20, 1, 0, 33)) for tile in SMALL),
     *((SMALL[1], counts) for counts in ((0, 0, 35, 0), (1,), tuple(i % 3 for i in range(11))))],
    ids=str,
)  # fmt: skip
def test_sums_in_the_interpreter(tile, counts):
    """Small integers, whose sums are exact in every order; all other memory is NaN."""
    k, n, experts, total = 72, 40, len(counts), sum(counts)
    around = torch.full((total + 70, k + 8), NAN)
    a = around[3 : total + 3, :k].copy_((rand(total, k, dtype=torch.float32) * 4).round())
    assert a.data_ptr() % 16 == 0
    dy = (rand(total, n, dtype=torch.float32, seed=1) * 4).round()
    weight = (rand(experts, k, n, dtype=torch.float32, seed=2) * 4).round()
    bias = rand(experts, n, dtype=torch.float32, seed=3).round()
    for b, added in itertools.product(layouts(weight).values(), (None, bias)):
        got = grouped.grouped_matmul(a, b, offsets_of(counts), bias=added, config=tile)
        parts = [a[s].double() @ weight[e].double() for e, s in enumerate(slices_of(counts))]
        parts = [part if added is None else part + added[e] for e, part in enumerate(parts)]
        assert_bitwise_equal(got, torch.cat(parts).float() + 0.0)
    wanted = torch.stack([a[s].double().t() @ dy[s].double() for s in slices_of(counts)]).float() + 0.0
    assert_bitwise_equal(grouped.grouped_outer(a, dy, offsets_of(counts), config=tile), wanted)


@in_interpreter
@pytest.mark.usefixtures("addressable")
def test_a_tile_whose_loads_run_ahead_makes_gradients_in_fp32_too():
    """By the other kernel: the one in which they do stores 16 bits."""
    counts, (a, dy) = (3, 0, 20), (rand(23, cols, dtype=torch.float32, seed=cols) for cols in (24, 40))
    got = []
    for ahead in (False, True):
        tile = dataclasses.replace(SMALL[0], ahead=ahead)
        got.append(grouped.grouped_outer(a, dy, offsets_of(counts), config=tile))
    assert_bitwise_equal(*got)
    exact = torch.stack([a[s].double().t() @ dy[s].double() for s in slices_of(counts)])
    assert (got[1].double() - exact).norm() <= 1e-5 * exact.norm()


@in_interpreter
@pytest.mark.usefixtures("addressable")
@pytest.mark.parametrize("value", (NAN, INF, -INF), ids=str)
def test_another_experts_rows_do_not_leak_in_the_interpreter(value):
    counts, tile = (5, 9, 40), SMALL[0]
    a, dy, weight = (rand(*shape, dtype=torch.float32) for shape in ((54, 24), (54, 40), (3, 24, 40)))
    clean = grouped.grouped_matmul(a, weight, offsets_of(counts), config=tile)
    gradient = grouped.grouped_outer(a, dy, offsets_of(counts), config=tile)
    a[5:14], dy[5:14], weight[1] = value, value, value
    c = grouped.grouped_matmul(a, weight, offsets_of(counts), config=tile)
    assert_bitwise_equal([c[:5], c[14:]], [clean[:5], clean[14:]])
    dw = grouped.grouped_outer(a, dy, offsets_of(counts), config=tile)
    assert_bitwise_equal(dw[::2].contiguous(), gradient[::2].contiguous())
    assert not c[5:14].isfinite().any() and not dw[1].isfinite().any()  # the control


@in_interpreter
def test_what_tma_cannot_address_is_left_to_the_other_kernel(monkeypatch):
    """With a GroupedTile that is an error, without one the product is made."""
    counts, tile = (2, 3), SMALL[0]
    a, weight = torch.ones(5, 24), torch.ones(2, 24, 40)
    for supported, x, w in ((False, a, weight), (True, torch.ones(5, 27)[:, 1:25], weight), (True, a, weight[..., 1:])):
        monkeypatch.setattr(grouped_tma, "supports_tma", lambda *args, supported=supported: supported)
        with pytest.raises(ValueError, match=re.escape("grouped_matmul: config is GroupedTile(block_m=16")):
            grouped.grouped_matmul(x, w, offsets_of(counts), config=tile)
        assert_bitwise_equal(grouped.grouped_matmul(x, w, offsets_of(counts)), torch.full((5, w.shape[2]), 24.0))
    monkeypatch.setattr(grouped_tma, "supports_tma", lambda *args: False)
    with pytest.raises(ValueError, match=re.escape("grouped_outer: config is GroupedTile(block_m=16")):
        grouped.grouped_outer(a, a, offsets_of(counts), config=tile)


@pytest.mark.parametrize("out_itemsize", (2, 4))
def test_the_rules_give_tiles_that_fit(out_itemsize):
    for average, experts in itertools.product((1, 16, 17, 64, 65, 128, 129, 500, 769, 5000), (1, 8, 128)):
        found = [
            grouped_tma.rows_tile(average * experts, experts, out_itemsize),
            grouped_tma.outer_tile(512, 768, average * experts, experts, out_itemsize),
        ]
        for tile in found:
            assert tile is None or grouped_tma.fits(tile, out_itemsize), (average, tile)
    assert not grouped_tma.fits(GroupedTile(128, 256, 64, 8, 5), 2)
    assert not grouped_tma.fits(GroupedTile(128, 256, 64, 4, 3), 2)


# --- a Hopper GPU -----------------------------------------------------------------------------------------------------


def dense(a: Tensor, b: Tensor, **options) -> Tensor:
    return matmul(a, b, **options)


@on_hopper
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bytes_of_the_dense_product(counts, dtype):
    """For every tile and layout, while one expert's rows are NaN and its weight infinite."""
    k, n, experts = 264, 520, len(counts)
    x, dy = rand(sum(counts), k, dtype=dtype), rand(sum(counts), n, dtype=dtype, seed=1)
    weight, bias = rand(experts, k, n, dtype=dtype, seed=2), rand(experts, n, dtype=torch.float32, seed=3)
    with_rows = [expert for expert, count in enumerate(counts) if count]
    bad = with_rows[len(with_rows) // 2] if len(with_rows) > 1 else None
    if bad is not None:
        x[slices_of(counts)[bad]], dy[slices_of(counts)[bad]], weight[bad] = NAN, -INF, INF
    parts = [(e, s) for e, s in enumerate(slices_of(counts)) if s.start < s.stop and e != bad]
    offsets = offsets_of(counts)
    wanted = {
        "forward": [dense(x[s], weight[e]) for e, s in parts],
        "bias": [dense(x[s], weight[e], bias=bias[e], out_dtype=torch.float32) for e, s in parts],
        "dgrad": [dense(dy[s], weight[e].t()) for e, s in parts],
        "wgrad": [dense(x[s].t(), dy[s]) for _, s in parts],
        "transposed": [dense(dy[s].t(), x[s]) for _, s in parts],
    }
    for tile, (name, w) in itertools.product(ROWS_TILES, layouts(weight).items()):
        got = {"forward": grouped.grouped_matmul(x, w, offsets, config=tile)}
        got["dgrad"] = grouped.grouped_matmul(dy, w.mT, offsets, config=tile)
        if grouped_tma.fits(tile, 4):
            got["bias"] = grouped.grouped_matmul(x, w, offsets, bias=bias, out_dtype=torch.float32, config=tile)
        for product, c in got.items():
            assert_bitwise_equal([c[s] for _, s in parts], wanted[product], f"{product} {tile} {name}")
    for tile in OUTER_TILES:
        for product, operands in (("wgrad", (x, dy)), ("transposed", (dy, x))):
            c = grouped.grouped_outer(*operands, offsets, config=tile)
            assert_bitwise_equal([c[e] for e, _ in parts], wanted[product], f"{product} {tile}")
            nothing = [e for e, count in enumerate(counts) if not count]
            assert_bitwise_equal(c[nothing], torch.zeros_like(c[nothing]))
    # and what is chosen without a config
    assert_bitwise_equal([grouped.grouped_outer(x, dy, offsets)[e] for e, _ in parts], wanted["wgrad"])
    assert_bitwise_equal([grouped.grouped_matmul(x, weight, offsets)[s] for _, s in parts], wanted["forward"])


@on_hopper
@pytest.mark.parametrize("rows, hidden, inner, experts", ((8192, 2048, 1536, 128), (4096, 2880, 2880, 8)))
def test_against_float64_and_the_generic_kernel(rows, hidden, inner, experts):
    """No larger an error than torch's grouped_mm has. The control: with rows in another order a gradient differs."""
    generator = torch.Generator().manual_seed(rows)
    chances = torch.rand(experts, generator=generator) ** 3
    chosen = torch.multinomial(chances, rows, replacement=True, generator=generator)
    counts = torch.bincount(chosen, minlength=experts).tolist()
    offsets = offsets_of(counts)
    shapes = (rows, hidden), (rows, inner), (experts, inner, hidden)
    x, dy, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    generic = MatmulConfig(64, 64, 64, 4, 3)
    products = {
        "forward": (
            lambda **o: grouped.grouped_matmul(x, weight.mT, offsets, **o),
            F.grouped_mm(x, weight.mT, offs=offsets[1:]),
            torch.cat([x[s].double() @ weight[e].double().t() for e, s in enumerate(slices_of(counts))]),
        ),
        "dgrad": (
            lambda **o: grouped.grouped_matmul(dy, weight, offsets, **o),
            F.grouped_mm(dy, weight, offs=offsets[1:]),
            torch.cat([dy[s].double() @ weight[e].double() for e, s in enumerate(slices_of(counts))]),
        ),
        "wgrad": (
            lambda **o: grouped.grouped_outer(dy, x, offsets, **o),
            F.grouped_mm(dy.t(), x, offs=offsets[1:]),
            torch.stack([dy[s].double().t() @ x[s].double() for s in slices_of(counts)]),
        ),
    }
    for name, (ours, theirs, exact) in products.items():
        got = ours()
        assert_bitwise_equal(ours(config=generic), got, name)
        assert (got.double() - exact).norm() <= 1.1 * (theirs.double() - exact).norm(), name
    order = torch.cat([s.start + torch.randperm(s.stop - s.start) for s in slices_of(counts)]).cuda()
    wide = {"out_dtype": torch.float32}
    assert not torch.equal(
        grouped.grouped_outer(dy[order], x[order], offsets, **wide), grouped.grouped_outer(dy, x, offsets, **wide)
    )
