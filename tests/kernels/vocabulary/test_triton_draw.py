"""Draws: Philox's known answers, log written out, softmax's distribution, and one id by every kernel and cut.

Compiled on a GPU, else in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from gpus import gpu

from tp_invariant.kernels.vocabulary import draw, reference_draw
from tp_invariant.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = pytest.mark.parametrize("kernels", [draw, reference_draw], ids=["triton", "reference"])


def data(rows: int, columns: int, seed: int = 0):
    """Scores of many magnitudes, a tenth of them truncated, and keys and positions of all 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.tensor([0.1, 2.0, 30.0])[torch.arange(rows) % 3, None]
    x[torch.rand(rows, columns, generator=generator) < 0.1] = -math.inf
    return x, torch.randint(-(2**63), 2**63 - 1, (rows, 2), generator=generator)


def on_device(x, key, first=0):
    ids, values = draw.draw(x.to(DEVICE), key.to(DEVICE), first)
    return ids.cpu(), values.cpu()


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # of Random123, the code of the paper
        (0, (0,) * 4, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generators_known_answers(key, counter, words):
    got = reference_draw.philox(torch.tensor([key]), tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in got) == words


def test_log_of_all_magnitudes():
    rng = random.Random(0)
    x = [rng.random() * 2.0 ** rng.randint(-1000, 1000) for _ in range(20000)]
    x += [1 - 2.0**-53, 1.0, 2.0**-53, math.sqrt(0.5), math.sqrt(2.0), 2.0**-1022, 1.7e308]
    x += [1 + (rng.random() - 0.5) * 2.0 ** -rng.randint(0, 50) for _ in range(20000)]
    ours = reference_draw.log(torch.tensor(x, dtype=torch.float64)).tolist()
    assert max(abs(y - math.log(a)) / math.ulp(math.log(a)) for a, y in zip(x, ours, strict=True) if a != 1) <= 2
    assert ours[20001] == 0.0


def test_one_element_alone_has_its_bits():
    x = torch.rand(1003, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([reference_draw.log(one) for one in x.split(1)])
    assert_bitwise_equal(reference_draw.log(x), alone)


@KERNELS
def test_the_value_is_the_score_and_a_gumbel_number(kernels):
    key = torch.tensor([[5, 2**40 + 7]])
    for index in (0, 1, 6, 131071):
        device = DEVICE if kernels is draw else "cpu"
        ids, values = kernels.draw(torch.full((1, 1), 0.75, device=device), key.to(device), index)
        u = reference_draw.uniform(key, torch.tensor([index])).item()
        assert ids.item() == index
        assert values.item() == pytest.approx(0.75 - math.log(-math.log(u)), rel=1e-14)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (4, 17), (3, 1025), (2, 3001)])
def test_the_references_bits(rows, columns):
    x, key = data(rows, columns)
    x[:, 0] = 1.0  # not all of a row is truncated
    for first in (0, 1, 150000):
        want = reference_draw.draw(x, key, first)
        assert_bitwise_equal(on_device(x, key, first), want)


@KERNELS
@pytest.mark.parametrize("cuts", [(0, 500, 1000), (0, 1, 250, 701, 1000), (0, 333, 334, 1000)], ids=str)
def test_parts_of_a_vocabulary_have_the_wholes_draw(kernels, cuts):
    x, key = (t.to(DEVICE if kernels is draw else "cpu") for t in data(6, 1000))
    x[0, :500] = -math.inf  # a part without any
    parts = [kernels.draw(x[:, first:last], key, first) for first, last in itertools.pairwise(cuts)]
    got = kernels.largest(torch.stack([value for _, value in parts]), torch.stack([ids for ids, _ in parts]))
    assert_bitwise_equal(got, kernels.draw(x, key, 0))


def test_rows_strides_and_blocks_change_no_bit(monkeypatch):
    x, key = data(5, 700)
    want = reference_draw.draw(x, key, 0)
    for got in (
        tuple(
            torch.cat(pair) for pair in zip(*(on_device(x[r : r + 1], key[r : r + 1]) for r in range(5)), strict=True)
        ),
        on_device(x.t().contiguous().t(), key.t().contiguous().t()),
        tuple(t.flip(0) for t in on_device(x.flip(0), key.flip(0))),
    ):
        assert_bitwise_equal(got, want)
    monkeypatch.setattr(draw, "MAX_BLOCK", 256)
    assert_bitwise_equal(on_device(x, key), want)
    # controls: another key, another position, another place of the same scores
    for other in (key + torch.tensor([1, 0]), key + torch.tensor([0, 1]), key + torch.tensor([0, 2**32])):
        assert (on_device(x, other)[1] != want[1]).all()
    assert (on_device(x, key, 2)[1] != want[1]).all()


@KERNELS
def test_ties_go_to_the_lower_id(kernels):
    values = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 5.0], [1.0, 2.0, 5.0]], dtype=torch.float64)
    ids = torch.tensor([[7, 9, 0], [3, 10, 20], [30, 1, 19]])
    got = kernels.largest(values, ids)
    assert_bitwise_equal(got, (torch.tensor([3, 9, 19]), torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)))


@KERNELS
def test_rows_without_a_draw_say_so(kernels):
    x, key = (t.to(DEVICE if kernels is draw else "cpu") for t in data(4, 1100))
    x[0, 1090], x[1, 3] = math.nan, math.inf
    x[2] = -math.inf
    values = kernels.draw(x, key, 0)[1].tolist()
    assert math.isnan(values[0]) and values[1] == math.inf and values[2] == -math.inf and math.isfinite(values[3])


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return ((counts - expected).square() / expected).sum().item()


def test_draws_are_distributed_as_softmax():
    """99.9% of such sums are below 29.6 (10 degrees of freedom). Control: the draws of another temperature are not."""
    logits = torch.linspace(-2.0, 2.0, 11)
    many = 50000
    for key in (
        torch.stack([torch.full((many,), 3), torch.arange(many)], dim=1),  # positions of one request
        torch.stack([torch.arange(many), torch.full((many,), 3)], dim=1),  # requests at one position
    ):
        for first in (0, 5):
            ids, _ = reference_draw.draw(logits.expand(many, -1), key, first)
            counts = torch.bincount(ids - first, minlength=11).double()
            assert chi_square(counts, logits.double().softmax(0)) < 29.6
            assert chi_square(counts, (logits.double() / 1.2).softmax(0)) > 29.6


@gpu
def test_large_on_a_gpu():
    x, key = data(64, 151936)
    want = reference_draw.draw(x, key, 0)
    assert_bitwise_equal(on_device(x, key), want)
    assert_bitwise_equal(tuple(t.cpu() for t in reference_draw.draw(x.cuda(), key.cuda(), 0)), want)
