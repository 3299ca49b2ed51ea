"""tpi.attention's sinks, masks and dropped keys: bits over heads, sequences and queries; values; what is refused.

On a CPU the reference runs, on a GPU the Triton kernels. tests/kernels/attention/test_triton_attention.py runs these in
the interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_cases import assert_same_bytes, attend, fresh, naively, paged_and_whole, part_of, plainly, tensors
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tp_invariant as tpi

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HEADS, KV_HEADS = 4, 2
# device, dtype, head size
PLACES = [
    pytest.param("cpu", torch.float32, 24, id="cpu-fp32-24"),
    pytest.param("cpu", torch.bfloat16, 16, id="cpu-bf16-16"),
    *(
        pytest.param("cuda", dtype, dim, marks=GPU, id=f"cuda-{dtype}-{dim}")
        for dtype, dim in (
            (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 64),
            (torch.bfloat16, 320),
        )
    ),
]  # fmt: skip


def sinks(device: str, queries: int, keys: int) -> Tensor:
    return torch.tensor([0.5, -2.0, 3.0, 40.0], device=device, requires_grad=True)


def random_like(device: str, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def allowed(device: str, queries: int, keys: int) -> Tensor:
    """One for all heads; the first query sees nothing, and a block of keys is hidden from all."""
    mask = random_like(device, 2, 1, queries, keys) > 0.3
    mask[..., 1:, 0] = True
    mask[..., 130:270] = False
    mask[:, :, 0] = queries == 1
    return mask


def bias(device: str, queries: int, keys: int) -> Tensor:
    """Of each head and sequence, learned; here and there -inf."""
    values = random_like(device, 2, HEADS, queries, keys) * 8 - 4
    return values.masked_fill(values > 3, -torch.inf).requires_grad_()


def slopes(device: str, queries: int, keys: int) -> Tensor:
    """ALiBi's, learned as one row for all queries and sequences."""
    position = torch.arange(keys, device=device, dtype=torch.float32)
    return (2.0 ** -torch.arange(4, HEADS + 4, device=device)[:, None, None] * position).requires_grad_()


# name: (options, {name of a tensor: what makes it})
CASES = {
    "bool": (dict(), dict(mask=allowed)),
    "bias": (dict(), dict(mask=bias)),
    "ALiBi": (dict(causal=True), dict(mask=slopes)),
    "bias of all options": (dict(causal=True, window=137, softcap=3.0, scale=0.3), dict(sinks=sinks, mask=bias)),
    "sinks": (dict(causal=True), dict(sinks=sinks)),
    "sinks of all options": (dict(causal=True, window=37, softcap=3.0, scale=0.3), dict(sinks=sinks)),
}


def options_of(kind: str, device: str, queries: int, keys: int) -> dict:
    options, makers = CASES[kind]
    return options | {name: make(device, queries, keys) for name, make in makers.items()}


def cut(options: dict, dim: int, index: int, parts: int) -> dict:
    """The options of a part of the heads (dim 1) or sequences (dim 0)."""

    def part(name: str, x):
        if not isinstance(x, Tensor) or (name == "sinks" and dim == 0):
            return x
        at = 0 if name == "sinks" else dim - 4 + x.dim()
        if at < 0:
            return x
        return x if x.shape[at] == 1 else x.detach().chunk(parts, at)[index].clone().requires_grad_(x.requires_grad)

    return {name: part(name, x) for name, x in options.items()}


def lengths_on(device: str) -> tuple:
    return ((1, 37), (150, 150), (40, 170)) if device == "cpu" else ((1, 4096), (77, 77), (1100, 1100), (300, 2100))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_heads_and_sequences_do_not_depend_on_each_other(device, dtype, dim, kind):
    for queries, keys in lengths_on(device):
        data = tensors(device, dtype, 2, HEADS, KV_HEADS, queries, keys, dim)
        options = options_of(kind, device, queries, keys)
        whole = attend(*data, **options)
        for axis, index in itertools.product((0, 1), (0, 1)):
            mine = [fresh(x.chunk(2, axis)[index]) for x in data]
            got = attend(*mine, **cut(options, axis, index, 2))
            expected = part_of(
                {name: x for name, x in whole.items() if name not in ("dsinks", "dmask")}, axis, index, 2
            )
            if axis == 1:
                expected |= {
                    name: cut({name[1:]: whole[name]}, 1, index, 2)[name[1:]] for name in whole.keys() - expected
                }
            got = {name: got[name] for name in expected}  # a sum over sequences is no part's
            assert_same_bytes(got, expected, f"part {index} along dim {axis}, {queries} queries, {keys} keys")


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_naive_attention_depends_on_other_heads(device, dtype, dim, kind):
    """The control, on the data of a case above."""
    data, options = tensors(device, dtype, 2, HEADS, KV_HEADS, 150, 150, dim), options_of(kind, device, 150, 150)
    whole = attend(*data, naively, **options)
    half = attend(*(fresh(x.chunk(2, 1)[0]) for x in data), naively, **cut(options, 1, 0, 2))
    assert all(not torch.equal(half[name], whole[name].chunk(2, 1)[0]) for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_error_against_float64(device, dtype, dim, kind):
    for queries, keys in ((150, 150), (40, 170)) if device == "cpu" else ((900, 900), (1, 2000)):
        data = tensors(device, dtype, 2, HEADS, KV_HEADS, queries, keys, dim, spread=0)
        options = options_of(kind, device, queries, keys)
        exact = attend(*(x.double() for x in data), plainly, **options)
        theirs, ours = attend(*data, plainly, **options), attend(*data, **options)
        mask = options.get("mask")
        biases = None if mask is None or mask.dtype == torch.bool else mask.detach()[mask.detach() > -torch.inf]
        largest = 16.0 if biases is None else max(16.0, float(biases.abs().max()) / 2)
        for name, value in exact.items():
            if not value.any():  # one query, whose one weight is 1
                continue
            size = value.norm()
            floor = largest * torch.finfo(torch.float32).eps  # lse is rounded where the largest scores are
            if name in ("dsinks", "dmask"):  # from sums of out * dout, of which out is rounded
                floor = max(floor, 2 * torch.finfo(dtype).eps)
            if name == "dsinks":  # and which cancel: of one query with a large sink nothing else is left
                size = (exact["out"] * data[3].double()).abs().sum(-1).norm()
            errors = [float((x[name].double() - value).norm() / size) for x in (ours, theirs)]
            assert errors[0] <= max(1.2 * errors[1], floor), (name, queries, errors)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_chunks_and_single_steps_are_the_prefill(device, dtype, dim, kind):
    """With a mask that hides the keys after a query, if the options do not."""
    length = 300 if device == "cpu" or dim > 256 else 2100
    q, k, v, _ = tensors(device, dtype, 2, HEADS, KV_HEADS, length, length, dim)
    options = options_of(kind, device, length, length)
    mask = options.get("mask")
    if mask is not None and not options.get("causal"):
        ahead = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        mask = mask.detach().masked_fill(ahead, False if mask.dtype == torch.bool else -torch.inf)
    whole = tpi.attention(q, k, v, **options | dict(mask=mask))
    for start, stop in ((0, 1), (64, 127), (127, 130), (200, 201), (length - 1, length)):
        own = None if mask is None else mask[..., slice(0, 1) if mask.shape[-2] == 1 else slice(start, stop), :stop]
        got = tpi.attention(fresh(q[:, :, start:stop]), k[:, :, :stop], v[:, :, :stop], **options | dict(mask=own))
        assert_same_bytes({"out": got}, {"out": whole[:, :, start:stop].contiguous()}, f"queries {start} to {stop}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_sinks_that_are_none_and_rows_without_keys(device):
    """-inf is no sink; a query that sees its sink alone gives zeros and no gradient."""
    data = tensors(device, torch.float32, 2, HEADS, KV_HEADS, 7, 3, 16)
    nothing = torch.full((HEADS,), float("-inf"), device=device, requires_grad=True)
    got, expected = attend(*data, causal=True, sinks=nothing), attend(*data, causal=True)
    assert not got.pop("dsinks").any()
    assert_same_bytes({"out": got.pop("out")}, {"out": expected["out"]}, "no sinks")
    for name, x in got.items():
        torch.testing.assert_close(x, expected[name])
    got = attend(*data, causal=True, sinks=sinks(device, 7, 3))
    assert not got["out"][:, :, :4].any() and not got["dq"][:, :, :4].any()
    assert all(x.isfinite().all() for x in got.values())
    for shapes in (((0, 4, 3), (0, 2, 3)), ((2, 4, 0), (2, 2, 3)), ((2, 4, 3), (2, 2, 0))):
        q, k, v = (torch.randn(*shape, 8, device=device) for shape in (shapes[0], shapes[1], shapes[1]))
        for name, x in attend(q, k, v, torch.ones_like(q), sinks=sinks(device, 0, 0)).items():
            assert not x.any(), name


def test_sinks_of_packed_sequences():
    """Each sequence has the bits that it has alone; the sinks' gradient is their sum."""
    of_it, cu = [0, 13, 40], torch.tensor([0, 13, 40], dtype=torch.int32)
    data = tensors("cpu", torch.float32, 1, HEADS, KV_HEADS, 40, 40, 16)
    whole = attend(*data, causal=True, cu_seqlens_q=cu, sinks=sinks("cpu", 0, 0))
    total = 0
    for start, stop in itertools.pairwise(of_it):
        alone = attend(*(fresh(x[:, :, start:stop]) for x in data), causal=True, sinks=sinks("cpu", 0, 0))
        total = total + alone.pop("dsinks")
        assert_same_bytes({name: whole[name][:, :, start:stop] for name in alone}, alone, f"from {start}")
    torch.testing.assert_close(whole["dsinks"], total)


@pytest.mark.parametrize("kind", CASES)
def test_as_an_operator_it_has_the_same_bits(kind):
    """Compiled, which also runs the operators' fake forms."""
    data, options = tensors("cpu", torch.float32, 2, HEADS, KV_HEADS, 40, 40, 16), options_of(kind, "cpu", 40, 40)
    compiled = torch.compile(tpi.attention, fullgraph=True, backend="aot_eager")
    assert_same_bytes(attend(*data, compiled, **options), attend(*data, **options), "compiled")


def test_a_gradient_for_sinks_alone_and_in_their_dtype():
    q, k, v, grad = tensors("cpu", torch.bfloat16, 2, HEADS, KV_HEADS, 9, 9, 16)
    parameter = torch.nn.Parameter(sinks("cpu", 0, 0).detach().bfloat16())
    tpi.attention(q, k, v, causal=True, sinks=parameter).backward(grad)
    expected = attend(q, k, v, grad, causal=True, sinks=parameter.detach().float().requires_grad_())["dsinks"]
    assert torch.equal(parameter.grad, expected.bfloat16())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_rows_that_a_mask_hides_whole(device):
    """torch's convention: zeros where a row is False or -inf; under float32's lowest number it has equal weights.

    The convention is that of torch's formula: its GPU kernels have others. Such a row has no gradient here.
    """
    data = tensors(device, torch.float32, 2, HEADS, HEADS, 9, 140, 16, spread=0)
    data[3][:, :, 2] = 0
    mask = torch.ones(9, 140, dtype=torch.bool, device=device)
    mask[2] = mask[5, :130] = False
    lowest = torch.finfo(torch.float32).min
    for given in (mask, *(torch.zeros(mask.shape, device=device).masked_fill(~mask, x) for x in (-torch.inf, lowest))):
        ours = attend(*data, mask=given)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = attend(*data, lambda *x, mask: F.scaled_dot_product_attention(*x, mask), mask=given)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        assert ours["out"][:, :, 2].any() == (given is not mask and given[2, 0] == lowest)


def test_strides_of_a_mask_change_no_bit():
    data, mask = tensors("cpu", torch.float32, 2, HEADS, KV_HEADS, 40, 40, 16), bias("cpu", 40, 40)
    expected = attend(*data, mask=mask)
    assert_same_bytes(attend(*data, mask=mask.detach().mT.contiguous().mT.requires_grad_()), expected, "transposed")
    one = mask.detach()[:1, :, :1]
    got, expected = attend(*data, mask=one), attend(*data, mask=one.expand(2, HEADS, 40, 40).contiguous())
    assert_same_bytes(got, expected, "broadcast")


@pytest.mark.parametrize("dim, of_values", [(192, 128), (256, 256), (128, 192), (96, 96), (320, 256)])
@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        *(pytest.param("cuda", dtype, marks=GPU) for dtype in (torch.bfloat16, torch.float32)),
    ],
)
def test_head_sizes(device, dtype, dim, of_values):
    """192 with values of 128, as in multi-head latent attention, and others."""
    queries, keys = (9, 150) if device == "cpu" else (300, 1100)
    q, k, v, grad = tensors(device, dtype, 2, HEADS, KV_HEADS, queries, keys, max(dim, of_values), spread=0)
    data = q[..., :dim], k[..., :dim], v[..., :of_values], grad[..., :of_values]
    options = dict(causal=True, window=140, sinks=sinks(device, queries, keys))
    whole = attend(*data, **options)
    assert whole["out"].shape == (2, HEADS, queries, of_values) and whole["dv"].shape == data[2].shape
    for axis in (0, 1):
        got = attend(*(fresh(x.chunk(2, axis)[1]) for x in data), **cut(options, axis, 1, 2))
        expected = part_of({name: whole[name] for name in ("out", "dq", "dk", "dv")}, axis, 1, 2)
        assert_same_bytes({name: got[name] for name in expected}, expected, f"half along dim {axis}")
    step = tpi.attention(fresh(data[0][:, :, -1:]), *data[1:3], **options)
    assert_same_bytes({"out": step}, {"out": whole["out"][:, :, -1:].contiguous()}, "a decode step")
    exact, theirs = attend(*(x.double() for x in data), plainly, **options), attend(*data, plainly, **options)
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (whole, theirs)]
        floor = max(16 * torch.finfo(torch.float32).eps, 2 * torch.finfo(dtype).eps if name == "dsinks" else 0.0)
        assert errors[0] <= max(1.2 * errors[1], floor), (name, errors)
    del options["window"]  # which leaves most queries the keys of one part
    control = attend(*(fresh(x.chunk(2, 1)[1]) for x in data), naively, **cut(options, 1, 1, 2))
    assert not torch.equal(control["out"], attend(*data, naively, **options)["out"].chunk(2, 1)[1])


@pytest.mark.parametrize("options", ["no mask", "a mask and sinks"])
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_a_cache_that_has_dropped_keys_gives_the_bits_of_all_keys(device, dtype, dim, options):
    """A decode step and a chunk; the control does not say where the first key stands."""
    length, window = (300, 70) if device == "cpu" else (2100, 700)
    q, k, v, grad = tensors(device, dtype, 2, HEADS, KV_HEADS, length, length, dim)
    options = (
        {} if options == "no mask" else dict(sinks=sinks(device, 0, 0), mask=bias(device, length, length).detach())
    )
    whole, differ = tpi.attention(q, k, v, causal=True, window=window, **options), 0
    for start, stop in ((length - 1, length), (length - 90, length - 40), (window, window + 1)):
        for first in {start - window + 1, (start - window + 1) // 2, 0}:
            mine = [fresh(x) for x in (q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop])]
            own = options | ({"mask": options["mask"][:, :, start:stop, first:stop]} if options else {})
            got = tpi.attention(*mine, causal=True, window=window, first_key=first, **own)
            assert_same_bytes({"out": got}, {"out": whole[:, :, start:stop].contiguous()}, f"from {first} to {stop}")
            differ += not torch.equal(tpi.attention(*mine, causal=True, window=window, **own), got)
    assert differ or options  # a sink of large weight leaves few bits of a 16-bit output to the keys
    got = attend(q[:, :, -9:], k[:, :, 150:], v[:, :, 150:], grad[:, :, -9:], causal=True, window=70, first_key=150)
    expected = attend(q[:, :, -9:], k, v, grad[:, :, -9:], causal=True, window=70)
    expected |= {name: expected[name][:, :, 150:] for name in ("dk", "dv")}
    assert_same_bytes(got, expected, "gradients")


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("device, dtype, dim", PLACES)
def test_packed_sequences_that_have_dropped_keys(device, dtype, dim, has_sinks):
    """Decode steps, a chunk and a whole prompt in one call, whose dropped keys have NaN in their places."""
    length, window = (700, 70) if device == "cpu" else (2100, 700)
    q, k, v, _ = tensors(device, dtype, 1, HEADS, KV_HEADS, length, length, dim)
    options = dict(causal=True, window=window, sinks=sinks(device, 0, 0).detach() if has_sinks else None)
    whole = tpi.attention(q, k, v, **options)
    for past in (False, True):  # keys that the window has passed are there, or not
        steps = [(length - 1, length), (length - 90, length - 40), (0, 50), (window, window + 1), (650, 650)]
        firsts = [max(0, start - window + 1) // (1 + past) for start, _ in steps]
        numbers = [(start, stop, first) for (start, stop), first in zip(steps, firsts, strict=True)]
        packed_q = torch.cat([q[:, :, start:stop] for start, stop, _ in numbers], 2)
        packed_k, packed_v = (torch.cat([x[:, :, first:stop] for _, stop, first in numbers], 2) for x in (k, v))
        cu_q, cu_k = (
            torch.tensor([0, *sizes], device=device).cumsum(0).int()
            for sizes in ([b - a for a, b in steps], [stop - first for _, stop, first in numbers])
        )
        own = options | dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        got = tpi.attention(
            packed_q, packed_k, packed_v, first_key=torch.tensor(firsts, dtype=torch.int32, device=device), **own
        )
        expected = torch.cat([whole[:, :, start:stop] for start, stop in steps], 2)
        assert_same_bytes({"out": got}, {"out": expected}, f"dropped {firsts}")
        control = tpi.attention(packed_q, packed_k, packed_v, **own)
        if dtype == torch.float32 and not has_sinks:  # 16 bits may hide it
            assert not torch.equal(control, expected), "the control does not say where first keys stand"


@pytest.mark.parametrize("options", [{}, dict(window=700), dict(softcap=3.0)], ids=str)
@pytest.mark.parametrize("page", [16, 48])
@pytest.mark.parametrize("device, dtype, dim", [place for place in PLACES if place.values[2] <= 256])
def test_pages_have_the_bits_of_one_tensor(device, dtype, dim, page, options):
    """Decode steps, a chunk and a whole prompt in one call, and steps alone."""
    length = 300 if device == "cpu" else 2100
    q, k, v, _ = tensors(device, dtype, 1, HEADS, KV_HEADS, length, length, dim)
    for steps in (((length - 1, length), (100, 170), (0, 60)), ((length - 1, length), (130, 131))):
        with_sinks = options | dict(sinks=sinks(device, 0, 0).detach())
        assert_same_bytes(*paged_and_whole(q, k, v, steps, page, with_sinks), f"{steps}")
    if dtype == torch.float32:
        assert not torch.equal(naively(q[:, :, -1:], k, v), naively(q, k, v, causal=True)[:, :, -1:]), "the control"


Q, KV = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
PACKED = dict(causal=True, window=4, cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32)) | dict(
    q=Q[:, :, :3], k=KV[:, :, :5], v=KV[:, :, :5], cu_seqlens_k=torch.tensor([0, 5], dtype=torch.int32)
)
REFUSED = [
    (dict(sinks=[0.0] * 4), TypeError, "sinks is a list: it must be a tensor"),
    (dict(sinks=torch.zeros(4).int()), TypeError, r"sinks is torch\.int32: it must be of a floating point dtype"),
    (dict(mask=torch.ones(6, 6).long()), TypeError, r"mask is torch\.int64: it must be a tensor of torch\.bool"),
    (dict(mask=torch.ones(6, 5).bool()), ValueError, r"mask is \(6, 5\) on cpu: .* here \(1, 4, 6, 6\)"),
    (dict(mask=torch.ones(6, 6, requires_grad=True)), ValueError, "requires a gradient and repeats over 4 heads"),
    (
        dict(mask=torch.ones(6, 6), cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32)),
        ValueError,
        "mask is given with cu_seqlens_q: packed sequences take causal and window alone",
    ),
    (dict(first_key=-1), ValueError, "first_key=-1 must be at least 0"),
    (
        dict(first_key=3),
        ValueError,
        "first_key=3 with window=None, 6 .* sees keys from position 0 on, which k does not",
    ),
    (
        dict(first_key=3, cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32)),
        ValueError,
        "first_key=3 is given with cu_seqlens_q: packed sequences need one for each, int32",
    ),
    (dict(first_key=torch.tensor([0])), ValueError, "first_key is a tensor: it needs packed sequences"),
    (
        dict(first_key=torch.tensor([3], dtype=torch.int32), **PACKED),
        ValueError,
        r"first_key=\[3\] with window=4, and first queries at \[5\]: a sequence has to have all",
    ),
    (
        dict(first_key=torch.tensor([0, 3], dtype=torch.int32), **PACKED),
        ValueError,
        r"first_key is torch.int32 \(2,\) on cpu: .* here \(1,\)",
    ),
    (
        PACKED | dict(first_key=torch.tensor([0], dtype=torch.int32), q=torch.zeros(1, 4, 3, 8, requires_grad=True)),
        ValueError,
        "requires a gradient, which there is none of",
    ),
    (dict(sinks=torch.zeros(2)), ValueError, r"sinks is \(2,\) on cpu: it must be \[4\], one for each head of q"),
]


@pytest.mark.parametrize("given, error, text", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        tpi.attention(**{"q": Q, "k": KV, "v": KV, **given})
