"""The CPU model of the tensor core: the recipe in integers, element by element, and the bits of a real GPU."""

import dataclasses
import functools
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from layer_cases import Case, assert_cases_invariant, run
from tensor_core_data import (
    ALTERNATIVES,
    CASES,
    RECORDED,
    RECORDED_SHAPE,
    gpu_kernels,
    mismatches,
    numbers,
    operands,
)

from tp_invariant.kernels.gemm import reference, tensor_core
from tp_invariant.kernels.gemm.tensor_core import HOPPER, Recipe, matmul, model
from tp_invariant.testing import assert_bitwise_equal, assert_slice_invariant, digest, run_ranks, wide_randn

DTYPES = tensor_core.DTYPES
DIGITS = {torch.bfloat16: (7, 127), torch.float16: (10, 15), torch.float32: (23, 127)}
NAN, INFINITY = 0x7FFFFFFF, 0x7F800000


# --- the recipe again, in Python's integers -------------------------------------------------------------------------


def as_term(bits, dtype):
    """(significand, exponent of its last bit, exponent) of a number given by its bits; text for infinity and NaN."""
    digits, bias = DIGITS[dtype]
    sign = -1 if bits >> (8 * dtype.itemsize - 1) & 1 else 1
    field, fraction = bits >> digits & (2 * bias + 1), bits & ((1 << digits) - 1)
    if field == 2 * bias + 1:
        return "nan" if fraction else ("+inf" if sign > 0 else "-inf")
    exponent = max(field, 1) - bias
    significand = fraction + (1 << digits if field else 0)
    return sign * significand, exponent - digits, exponent


def times(x, y):
    if isinstance(x, tuple) and isinstance(y, tuple):
        return x[0] * y[0], x[1] + y[1], x[2] + y[2]
    signs = []
    for factor in (x, y):
        if factor == "nan" or (isinstance(factor, tuple) and factor[0] == 0):
            return "nan"
        signs.append(factor == "-inf" or (isinstance(factor, tuple) and factor[0] < 0))
    return "-inf" if signs[0] != signs[1] else "+inf"


def toward_zero(significand, right):
    """significand / 2^right without its fraction."""
    magnitude = abs(significand)
    magnitude = magnitude >> right if right > 0 else magnitude << -right
    return magnitude if significand > 0 else -magnitude


def fp32_step(acc, products):
    """The bits of the accumulator after one step."""
    terms = [as_term(acc, torch.float32), *products]
    special = {term for term in terms if isinstance(term, str)}
    if special:
        return NAN if len(special) > 1 or "nan" in special else INFINITY | (special == {"-inf"}) << 31
    least = terms[0][2] if terms[0][0] else -133
    top = max([least] + [exponent for significand, _, exponent in terms[1:] if significand])
    total = sum(toward_zero(significand, top - 25 - last) for significand, last, _ in terms)
    drop = max(abs(total).bit_length() - 24, -149 - (top - 25))
    magnitude, last = abs(toward_zero(total, drop)), drop + top - 25
    sign = (total < 0) << 31
    if magnitude and magnitude.bit_length() + last > 128:
        return sign | INFINITY
    while magnitude and magnitude.bit_length() < 24 and last > -149:
        magnitude, last = magnitude << 1, last - 1
    return sign | (magnitude + (last + 149 << 23) if magnitude.bit_length() == 24 else magnitude)


def by_integers(a, b):
    """fp32 a @ b, element by element."""
    a_bits, b_bits = ([[x & 0xFFFF for x in row] for row in t.view(torch.int16).tolist()] for t in (a, b.t()))
    out = []
    for row, col in itertools.product(a_bits, b_bits):
        products = [times(as_term(x, a.dtype), as_term(y, a.dtype)) for x, y in zip(row, col, strict=True)]
        acc = 0
        for start in range(0, len(products), 16):
            acc = fp32_step(acc, products[start : start + 16])
        out.append(0 if acc == 1 << 31 else acc)  # + 0.0
    bits = torch.tensor(out, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32).view(a.shape[0], b.shape[1])


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_the_recipe(name, dtype):
    a, b = operands(name, 6, 7, 100, dtype)
    got, want = matmul(a, b, out_dtype=torch.float32), by_integers(a, b)
    count, text = mismatches(got, want)
    assert not count, f"{count} of {got.numel()} elements differ:\n{text}"


def in_steps(*steps):
    """A sum of products: for each step its terms, (sign, exponent)."""
    a, b = torch.zeros(2, 16 * len(steps), dtype=torch.float64)
    for start, terms in zip(range(0, len(a), 16), steps, strict=True):
        for k, (sign, exponent) in enumerate(terms, start):
            a[k], b[k] = sign * 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    return matmul(a[None].bfloat16(), b[:, None].bfloat16(), out_dtype=torch.float32).item()


@pytest.mark.parametrize(
    ("before", "first", "least"),
    [
        ([], [(1, -140)], -158),
        ([[(1, -140), (-1, -140)]], [(1, -140)], -158),
        ([[(1, -150)]], [(1, -140)], -158),
        ([[(1, -140)]], [], -151),
        ([[(1, -126)]], [], -151),
    ],
    ids=["zero", "cancelled", "truncated to zero", "subnormal", "normal"],
)
def test_the_least_term_that_a_step_keeps(before, first, least):
    """25 bits below the accumulator's exponent: -126 if it is subnormal, -133 if it is zero, whatever led to it."""
    total = in_steps(*before, first)
    assert total in (2.0**-140, 2.0**-126)
    assert in_steps(*before, [*first, (-1, least)]) == total - 2.0**-149  # truncated toward zero, so any rest shows
    assert in_steps(*before, [*first, (-1, least - 1)]) == total


def first_digits(obj):
    return digest(obj)[:16]


@pytest.mark.parametrize(("name", "k"), RECORDED, ids=str)
def test_recorded_bits_of_an_h200(name, k):
    a, b = operands(name, *RECORDED_SHAPE, k, torch.bfloat16)
    data, sums = RECORDED[name, k]
    assert first_digits((a, b)) == data, "torch's generator gives other numbers than those recorded: record them again"
    assert first_digits(matmul(a, b, out_dtype=torch.float32)) == sums


@pytest.mark.parametrize("label", [label for label in ALTERNATIVES if "accumulators" in label])
def test_another_recipe_does_not_give_the_recorded_bits(label):
    """The negative control: another exponent for small accumulators does not give the H200's bits."""
    a, b = operands("sums below subnormals", *RECORDED_SHAPE, 32, torch.bfloat16)
    other = model(a, b, None, torch.float32, ALTERNATIVES[label])
    assert first_digits(other) != RECORDED["sums below subnormals", 32][1]


def test_data_reach_the_special_cases():
    """Sums that are subnormal, infinite, NaN: otherwise the cases above would prove nothing about them."""
    seen = {name: matmul(*operands(name, 16, 16, 128, dtype), out_dtype=torch.float32) for name, dtype in CASES}
    assert (seen["subnormal sums"].abs() < 2.0**-126).any() and (seen["sums below subnormals"] != 0).any()
    assert seen["overflow"].isinf().any() and not seen["overflow"].isinf().all()
    for name in ("infinities", "NaN", "infinity of one sign"):
        assert seen[name].isnan().any() and seen[name].isfinite().any(), name
    assert seen["infinities"].isinf().any()
    assert seen["cancelling"].abs().median() < 1e-2 * seen["wide exponents"].abs().median()


@functools.cache
def sums(recipe):
    """fp32 sums of every class of data."""
    data = (operands(name, 20, 24, 256, dtype) for name, dtype in CASES)
    return [model(a, b, None, torch.float32, recipe) for a, b in data]


@pytest.mark.parametrize("recipe", ALTERNATIVES.values(), ids=ALTERNATIVES)
def test_another_recipe_gives_other_bits(recipe):
    """The negative control: each alternative gives other bits on some class of data, so a GPU's bits identify it."""
    assert any(mismatches(got, right)[0] for got, right in zip(sums(recipe), sums(HOPPER), strict=True))


def test_every_field_of_the_recipe_has_an_alternative():
    varied = {
        field.name
        for field in dataclasses.fields(Recipe)
        for recipe in ALTERNATIVES.values()
        if getattr(recipe, field.name) != getattr(HOPPER, field.name)
    }
    assert varied == {field.name for field in dataclasses.fields(Recipe)}


# --- a gemm_fn ------------------------------------------------------------------------------------------------------


def wide(*shape, dtype, seed=0):
    spread = 2 if dtype == torch.float16 else 6
    return wide_randn(*shape, generator=torch.Generator().manual_seed(seed), spread=spread).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(dtype):
    a, b, bias = wide(60, 700, dtype=dtype), wide(700, 50, dtype=dtype, seed=1), wide(50, dtype=dtype, seed=2)
    exact = a.double() @ b.double() + bias.double()
    theirs = (a.float() @ b.float() + bias.float()).to(dtype)
    ours, torchs = ((c.double() - exact).norm() / exact.norm() for c in (matmul(a, b, bias=bias), theirs))
    assert ours <= 1.1 * torchs
    full = matmul(a, b, bias=bias, out_dtype=torch.float32)
    assert (full.double() - exact).norm() / exact.norm() < 4e-6
    # 25 bits and truncation: not a correctly rounded sum, nor the one of the CPU's gemm_fn
    assert mismatches(full, reference.matmul(a, b, bias=bias, out_dtype=torch.float32))[0] > full.numel() / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slice_invariant(dtype):
    assert_slice_invariant(matmul, shapes=((9, 11, 150), (5, 3, 17)), dtypes=(dtype,), device="cpu")


def test_tiles_change_no_bit(monkeypatch):
    a, b = wide(70, 130, dtype=torch.bfloat16), wide(130, 60, dtype=torch.bfloat16)
    whole = matmul(a, b)
    monkeypatch.setattr(tensor_core, "_TILE_ROWS", 16)
    monkeypatch.setattr(tensor_core, "_TILE_COLS", 7)
    assert_bitwise_equal(matmul(a, b), whole)


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bias_is_added_in_fp32_and_rounded_once(out_dtype, bias_dtype):
    a, b, bias = wide(30, 64, dtype=torch.float16), wide(64, 20, dtype=torch.float16), wide(20, dtype=bias_dtype)
    sums = matmul(a, b, out_dtype=torch.float32)
    assert_bitwise_equal(matmul(a, b, bias=bias, out_dtype=out_dtype), (sums + bias.float()).to(out_dtype))
    if out_dtype != torch.float32:  # rounding twice is something else
        assert mismatches((sums.to(out_dtype) + bias.to(out_dtype)), (sums + bias.float()).to(out_dtype))[0]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_zero_infinity_and_nan(out_dtype):
    """The result has no negative zero, and every NaN is the one that a GPU writes."""
    inf, nan = float("inf"), float("-nan")
    a = torch.tensor([[-0.0, -0.0], [1.0, inf], [inf, -inf], [nan, 1.0], [2.0**60, 2.0**60]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0, -(2.0**100)], [2.0, 0.0]], dtype=torch.bfloat16)
    got = matmul(a, b, bias=torch.tensor([-0.0, 0.0]), out_dtype=out_dtype)
    bits = {torch.float32: 0x7FFFFFFF}.get(out_dtype, 0x7FFF)
    as_int = got.view(torch.int32 if out_dtype == torch.float32 else torch.int16)
    assert as_int[0].tolist() == [0, 0]
    assert got[1, 0] == inf and got[4, 1] == -inf
    assert [as_int[1, 1], as_int[2, 0], as_int[3, 0], as_int[3, 1]] == [bits] * 4
    assert as_int[2, 1] == bits  # -inf * 0


def test_results_round_to_subnormal_and_infinite_halves():
    a = torch.full((1, 16), 2.0**-8, dtype=torch.float16)
    b = torch.full((16, 1), 2.0**-14, dtype=torch.float16)
    assert matmul(a, b).item() == 2.0**-18
    assert matmul(torch.full((1, 16), 2.0**8, dtype=torch.float16), a.t() * 2.0**12).item() == float("inf")


def test_refusals():
    half = torch.ones(2, 3, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"^a is torch.float32: the tensor core model takes torch.bfloat16, torch.flo"):
        matmul(half.float(), half.float().t())
    with pytest.raises(TypeError, match="allowed: the dtype of a"):
        matmul(half, half.t().bfloat16())
    with pytest.raises(ValueError, match="with the K of a"):
        matmul(half, half)
    with pytest.raises(ValueError, match="a is on meta: this gemm_fn is for the CPU"):
        matmul(half.to("meta"), half.t().to("meta"))


# --- in a layer -----------------------------------------------------------------------------------------------------

LAYER = Case("row", 256, 24, (12,), dtype=torch.bfloat16, gemm_fn=matmul, micro_batches=1)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_layer_has_the_same_bits_at_every_degree(degree):
    column = LAYER.with_(parallel_mode="column", in_features=24, out_features=256)
    assert_cases_invariant([LAYER, LAYER.with_(sequence_parallel=True), column], degree)


def test_a_layer_runs_on_it():
    """Its forward, dgrad and wgrad; and, the negative control, other bits with the mode off at TP=2."""
    mine, data = run(None, LAYER), LAYER.full_data()
    assert_bitwise_equal(mine["y0"], matmul(data["x0"], data["weight"].t(), bias=data["bias"]))
    assert_bitwise_equal(mine["dx0"], matmul(data["dy0"], data["weight"]))
    assert_bitwise_equal(mine["d_weight"], matmul(data["dy0"].t(), data["x0"]))
    assert mismatches(run_ranks(run, 2, LAYER.with_(mode=False), device="cpu")[1]["y0"], mine["y0"])[0]


# --- a real one -----------------------------------------------------------------------------------------------------


HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_the_bits_of_a_gpu(name, dtype):
    """Each of Triton's paths to a tensor core; TMA takes only the first shape."""
    for (m, n, k), out_dtype, biased in itertools.product(
        ((130, 136, 512), (33, 65, 250)), (torch.float32, dtype), (False, True)
    ):
        a, b = operands(name, m, n, k, dtype)
        bias = numbers((1, n), dtype, -3, 3, torch.Generator().manual_seed(1))[0] if biased else None
        want = matmul(a, b, bias=bias, out_dtype=out_dtype)
        for kernel, gemm_fn in gpu_kernels().items():
            got = gemm_fn(a.cuda(), b.cuda(), bias=bias.cuda() if biased else None, out_dtype=out_dtype)
            count, text = mismatches(got, want)
            where = f"{kernel}, {m}x{n}x{k} to {out_dtype}, bias {biased}"
            assert not count, f"{where}: {count} of {got.numel()} elements differ:\n{text}"


def load_probe():
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "probe_tensor_core.py"
    spec = importlib.util.spec_from_file_location("probe_tensor_core", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_probe_tells_recipes_apart(capsys, monkeypatch):
    """For a tensor core of another recipe the probe names that recipe; for the model it reports agreement."""
    probe = load_probe()
    for name, size in dict(M=8, N=12, K=64).items():
        monkeypatch.setattr(probe, name, size)
    cases = [("ordinary", torch.float16), ("sums below subnormals", torch.bfloat16)]
    assert probe.probe({"bundled": matmul}, "cpu", cases) == 0
    assert "every bit of 2 of 2" in capsys.readouterr().out

    def other(a, b, *, bias=None, out_dtype=None):
        return model(a, b, bias, out_dtype, Recipe(flush=True))

    assert probe.probe({"bundled": other, "mma.sync": matmul}, "cpu", cases) == 1
    said = capsys.readouterr().out
    assert "Wrong: sums below subnormals torch.bfloat16" in said and "subnormal expected, zero got" in said
    assert "every element of a part: {'flush': True}" in said and "mma.sync gives other bits" in said
