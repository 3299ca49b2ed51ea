"""The kernels of clipping: the documented order, the same bits from Triton and from plain torch, for any slice."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from gpus import gpu

from tp_invariant.kernels.grad_norm import kernel as grad_norm
from tp_invariant.kernels.grad_norm import reference as reference_grad_norm
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROOMS = pytest.mark.parametrize("room", [reference_grad_norm, grad_norm], ids=["reference", "triton"])
# (shape, leaf dim); rows and columns, vectors of 16 bytes and not, less and more than the lanes, and nothing
SHAPES = [
    ((37, 300), 0), ((37, 300), 1), ((64, 512), 0), ((64, 512), 1), ((300, 70), 1), ((5, 48, 7), 1), ((2, 3, 130), 1),
    ((9,), 0), ((), 0), ((70, 1), 0), ((1, 70), 1), ((17, 128), 0), ((129, 33), 1), ((0, 3), 0), ((3, 0), 0),
]  # fmt: skip


def device_of(room):
    return "cpu" if room is reference_grad_norm else DEVICE


def tensors(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = 2 if dtype == torch.float16 else 6
    return [wide_randn(*shape, generator=generator, spread=spread).to(dtype) for shape, _ in SHAPES]


DIMS = [dim for _, dim in SHAPES]


def stated(leaf):
    """The sum of squares of one partial sum, number by number, as documented in kernels/grad_norm/reference.py."""
    lanes = [numpy.float32(0)] * 128
    for i, value in enumerate(leaf.flatten().float().numpy()):
        lanes[i % 128] = lanes[i % 128] + value * value
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    return float(lanes[0])


@ROOMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_is_the_documented_one(room, dtype):
    xs = tensors(dtype)
    sums = room.sums_of_squares([x.to(device_of(room)) for x in xs], DIMS)
    leaves = [leaf for x, dim in zip(xs, DIMS, strict=True) for leaf in (x.unbind(dim) if x.dim() else [x])]
    assert_bitwise_equal(sums.cpu(), torch.tensor([stated(leaf) for leaf in leaves]))
    backwards = torch.tensor([stated(leaf.flatten().flip(0)) for leaf in leaves])
    assert not torch.equal(backwards, sums.cpu()), "the data cannot tell one order from another"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_has_the_bits_of_plain_torch(dtype):
    xs = tensors(dtype, seed=1)
    expected = reference_grad_norm.sums_of_squares(xs, DIMS)
    there = [x.to(DEVICE) for x in xs]
    assert_bitwise_equal(grad_norm.sums_of_squares(there, DIMS).cpu(), expected)
    assert_bitwise_equal(grad_norm.fold(expected.to(DEVICE)).cpu(), reference_grad_norm.fold(expected))


@ROOMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(room, dtype):
    xs = tensors(dtype, seed=2)
    sums = room.sums_of_squares([x.to(device_of(room)) for x in xs], DIMS)
    moved = [
        (x.double() ** 2).movedim(dim, 0) if x.dim() else x.double().view(1) ** 2
        for x, dim in zip(xs, DIMS, strict=True)
    ]
    exact = torch.cat([x.flatten(1).sum(1) if x.dim() > 1 else x for x in moved])
    torch.testing.assert_close(sums.double().cpu(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(room.fold(sums).double().cpu(), exact.sum(), rtol=1e-6, atol=0)


@ROOMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_does_not_depend_on_other_sums(room, dtype):
    """Any range of partial sums, at any address and stride, alone or among other tensors, and with NaN around."""
    generator = torch.Generator().manual_seed(3)
    for shape, dim in (((70, 390), 0), ((390, 70), 1), ((4, 70, 66), 1)):
        x = wide_randn(*shape, generator=generator, spread=2).to(device_of(room), dtype)
        whole = room.sums_of_squares([x], [dim])
        for first, last in ((0, 1), (3, 40), (16, 32), (69, 70)):
            part = x.narrow(dim, first, last - first)
            memory = torch.full((part.numel() + 3,), math.nan, dtype=dtype, device=x.device)
            moved = memory[3:].view(part.shape).copy_(part)
            for name, given in (("a view", part), ("unaligned", moved), ("a copy", part.clone())):
                got = room.sums_of_squares([torch.ones(5, device=x.device), given, x], [0, dim, dim])
                assert_bitwise_equal(
                    got[5 : 5 + last - first], whole[first:last], f"{shape}, {first} to {last}, {name}"
                )


@ROOMS
@pytest.mark.parametrize("count", [0, 1, 2, 127, 4096, 4097, 90_001])
def test_fold(room, count):
    v = (torch.rand(count, generator=torch.Generator().manual_seed(4)) + 2**-20).to(device_of(room))
    assert_bitwise_equal(room.fold(v).cpu(), reference_grad_norm.fold(v.cpu()))
    torch.testing.assert_close(room.fold(v).double(), v.double().sum(), rtol=1e-6, atol=0)
    assert_bitwise_equal(room.fold(torch.cat([v, v.new_zeros(50)])), room.fold(v), "zeros behind the end")


@ROOMS
@pytest.mark.parametrize("factor", [0.3, 1.0, math.nan, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_is_torchs(room, dtype, factor):
    xs = tensors(dtype, seed=5)
    xs.append(xs[0].clone().t())
    xs.append(torch.cat([torch.ones(3, dtype=dtype), xs[2].flatten()])[3:])
    xs.append(torch.tensor([-0.0, 0.0, math.inf, 6e-8, -6e-8, 1e-40]).to(dtype))
    expected = [(x.float() * torch.tensor(factor)).to(dtype) for x in xs]
    there = [x.to(device_of(room)) for x in xs]
    there[-2] = torch.cat([torch.ones(3, dtype=dtype), xs[2].flatten()]).to(device_of(room))[3:]
    versions = [x._version for x in there]
    room.scale_(there, torch.tensor(factor, device=device_of(room)))
    for x, want, version in zip(there, expected, versions, strict=True):
        assert_bitwise_equal(x.isnan().cpu(), want.isnan())
        assert_bitwise_equal(x.cpu().nan_to_num(0.0), want.nan_to_num(0.0))
        assert x._version > version, "autograd must see the change"


@ROOMS
def test_gradients_in_the_same_memory_are_scaled_one_after_another(room):
    """As by a loop: the programs of one launch would read and write them in any order."""
    memory = torch.arange(1.0, 9001.0, device=device_of(room))
    given = [memory[:6000], memory[3000:], memory[:6000], memory[8999:].view(())]
    given.append(given[0])
    expected = memory.clone()
    for part in (expected[:6000], expected[3000:], expected[:6000], expected[8999:], expected[:6000]):
        part.mul_(0.3)
    room.scale_(given, torch.tensor(0.3, device=memory.device))
    assert_bitwise_equal(memory, expected)


@ROOMS
def test_views_that_torch_negates(room):
    x = torch.complex(torch.randn(6, 40), torch.randn(6, 40)).to(device_of(room))
    negated, plain = x.conj().imag, x.conj().imag.clone()
    assert negated.is_neg()
    assert_bitwise_equal(room.sums_of_squares([negated], [0]), room.sums_of_squares([plain], [0]))
    for one in (negated, plain):
        room.scale_([one], torch.tensor(-0.5, device=one.device))
    assert_bitwise_equal(negated.clone(), plain)
    assert torch.equal(x.imag, -plain)


@gpu
def test_in_a_cuda_graph():
    """The addresses are part of the graph: a replay reads the present contents of the tensors."""
    xs = [x.to(DEVICE) for x in tensors(torch.bfloat16)]
    factor = torch.full((), 0.5, device=DEVICE)
    for call in (lambda: grad_norm.sums_of_squares(xs, DIMS), lambda: grad_norm.scale_(xs, factor)):
        grad_norm._slice_plan.cache_clear()
        grad_norm._scale_plan.cache_clear()
        with (
            pytest.raises(RuntimeError, match="call it once right before the capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    before = grad_norm.sums_of_squares(xs, DIMS)  # also warms up
    grad_norm.scale_([torch.ones_like(x) for x in xs], factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = grad_norm.sums_of_squares(xs, DIMS)
        total = grad_norm.fold(sums)
        grad_norm.scale_(xs, factor)
    for step in range(3):
        for size in range(
            1, 20
        ):  # other shapes, whose tables take these tables' places, and their memory if it is free
            others = [torch.ones(size, size, device=DEVICE) for _ in range(len(xs))]
            grad_norm.sums_of_squares(others, [0] * len(others))
            grad_norm.scale_(others, factor)
        garbage = [torch.full((size,), 2**31 - 1, dtype=torch.int32, device=DEVICE) for size in range(1, 400)]
        graph.replay()
        torch.cuda.synchronize()
        assert_bitwise_equal(sums, before * 0.25**step, "halves are exact")
        assert_bitwise_equal(total, grad_norm.fold(before * 0.25**step))
        del garbage


# --- digests --------------------------------------------------------------------------------------------------------

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(x: torch.Tensor) -> list[torch.Tensor]:
    """x with one bit changed in the first, the last and a middle element; with its rows exchanged, and its columns."""
    words = x.reshape(-1).view(_INTEGERS[x.element_size()])
    changed = []
    for place in sorted({0, len(words) // 2, len(words) - 1}):
        other = words.clone()
        other[place] ^= 1
        changed.append(other)
    if x.dim() == 2:
        changed += [words.view(x.shape).flip(0).reshape(-1), words.view(x.shape).roll(1, dims=1).reshape(-1)]
    return [other.view(x.dtype).view(x.shape) for other in changed]


@ROOMS
def test_digests_depend_on_bytes_and_positions_alone(room):
    """Small and large tensors, on word boundaries and beside them; one bit anywhere, exchanged elements and rows."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(3,), (4, 5), (), (33, 65), (4100,), (1,)]
    large = [(17, 257)] if room is grad_norm else [(300, 257), (16, 8192), (8193, 3)]
    xs = [
        wide_randn(*shape, generator=generator, spread=2).to(dtype).to(device_of(room))
        for shape in shapes + large
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    before = room.digests(xs)
    assert before.dtype == torch.int64 and len(set(before.tolist())) == len(xs)
    assert_bitwise_equal(room.digests([x.mT.contiguous().mT if x.dim() == 2 else x.clone() for x in xs]), before)
    shifted = [torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape) for x in xs]
    assert_bitwise_equal(room.digests(shifted), before)
    for variant in range(5):
        changed = [changes(x)[variant : variant + 1] for x in xs]
        for some in (range(0, len(xs), 2), range(1, len(xs), 2)):  # those between them must not see it
            here = [i for i in some if changed[i]]
            digests = room.digests([changed[i][0] if i in here else x for i, x in enumerate(xs)])
            assert (digests != before).nonzero().flatten().tolist() == here
    twice = room.digests([xs[0], xs[0], -xs[0], torch.zeros_like(xs[0]), torch.zeros_like(xs[0])[:0]])
    assert len(set(twice.tolist())) >= 4
