"""Digests and the bitwise comparison depend on every bit of the values and on nothing else; their messages."""

import dataclasses
import math
import struct

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tp_invariant.core.bits import leaves, raw_bytes
from tp_invariant.testing import assert_bitwise_equal, digest, run_ranks

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


@dataclasses.dataclass
class Pair:
    left: object
    right: object


def sample(dtype, shape=(3, 4)):
    generator = torch.Generator().manual_seed(7)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def differs(left, right):
    """Whether the digest and the comparison find a difference; they must agree."""
    try:
        assert_bitwise_equal(left, right)
        unequal = False
    except AssertionError:
        unequal = True
    assert (digest(left) != digest(right)) is unequal, "the digest and the comparison disagree"
    return unequal


# --- what must differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_is_compared(dtype):
    x = sample(dtype, (5,))
    bits = 1 if dtype == torch.bool else 8 * x.element_size()
    for bit in range(bits):
        flipped = x.clone()
        flipped.view(torch.uint8).view(5, -1)[3, bit // 8] ^= 1 << (bit % 8)
        assert differs(x, flipped), f"bit {bit}"


def test_negative_zero_is_not_zero():
    assert differs(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert differs(0.0, -0.0)
    assert differs({"loss": 0.0}, {"loss": -0.0})


def test_nan_payloads_differ_and_the_same_nan_is_equal():
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert differs(quiet, other)
    assert not differs(quiet, quiet.clone())
    assert not differs(math.nan, math.nan)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
        (torch.zeros(()), 0.0),
        (torch.zeros(2), [0.0, 0.0]),
        (1, 1.0),
        (1, True),
        (1.5, "1.5"),
        (None, 0),
        (None, torch.zeros(())),
        (0.1 + 0.2, 0.3),
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0], [1.0, 1.0]),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}),
        ([[1.0], 2.0], [1.0, [2.0]]),
        ([[1.0, 2.0]], [1.0, 2.0]),
        (Pair(1.0, 2.0), Pair(2.0, 1.0)),
        (Pair(1.0, 2.0), [1.0, 2.0]),
        ({"1": 0.0}, {1: 0.0}),
        ([1.0, []], [1.0]),
        ({"grads": {}}, {}),
        ([[]], []),
        (None, []),
    ],
)
def test_dtype_shape_kind_and_structure_are_compared(left, right):
    assert differs(left, right)


# --- what must not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_are_not_compared(dtype):
    x = sample(dtype, (4, 6))
    variants = [x.t().contiguous().t(), torch.cat([x, x], 1)[:, :6], x.repeat_interleave(2, 0)[::2], x.clone()]
    for variant in variants:
        assert not differs(x, variant)
    assert differs(x, x.t().contiguous().view(4, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_dims_of_size_one_are_not_compared(dtype):
    """torch calls such a tensor contiguous whatever its strides are."""
    x = sample(dtype, (4, 6))
    for odd in (x[:1, ::6], x[2:3, 1:2], x.t()[:1, :1], x[1:2].t()[:1]):
        assert not differs(odd, torch.tensor(odd.tolist(), dtype=dtype))


def test_lazily_conjugated_and_negated_views_are_their_values():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert not differs(z.conj(), z.conj().resolve_conj())
    assert not differs(z.conj().imag, z.conj().imag.resolve_neg())
    assert differs(z.conj().imag, z.imag)


def test_raw_bytes_are_little_endian_rows():
    x = torch.tensor([[1.0, -2.0]])
    expected = [list(struct.pack("<f", 1.0)), list(struct.pack("<f", -2.0))]
    assert raw_bytes(x).tolist() == expected
    assert raw_bytes(torch.tensor(True)).tolist() == [[1]]
    assert raw_bytes(torch.zeros(0, 4)).shape == (0, 4)


def test_names_of_leaves():
    nest = {"x": [1, (2, 3)], 5: Pair("a", {"b": None})}
    names = ["['x'][0]", "['x'][1][0]", "['x'][1][1]", "[5].left", "[5].right['b']"]
    assert [name for name, _ in leaves(nest)] == names
    assert list(leaves(3.0)) == [("value", 3.0)]


# --- what the comparison says ---------------------------------------------------------------------------------------


def message(actual, expected, name=""):
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(actual, expected, name)
    return str(caught.value)


def test_message_counts_and_shows_the_first_difference():
    x = torch.zeros(2, 3)
    y = x.clone()
    y[0, 2], y[1, 1] = -0.0, 1.5
    assert message({"grad": x}, {"grad": y}) == (
        "['grad']: 2 of 6 elements differ; the first at index (0, 2): 0.0 (0x00000000) against -0.0 (0x80000000)"
    )


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (
            torch.tensor(1.0, dtype=torch.bfloat16),
            torch.tensor(1.0078125, dtype=torch.bfloat16),
            "y: 1 of 1 elements differ; the first at index (): 1.0 (0x3f80) against 1.0078125 (0x3f81)",
        ),
        (
            torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32),
            torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32),
            "y: 1 of 2 elements differ; the first at index (0,): nan (0x7fc00000) against nan (0x7fc00001)",
        ),
        (
            torch.zeros(2, 3, dtype=torch.float16),
            torch.zeros(3, 2, dtype=torch.bfloat16),
            "y: dtype or shape: torch.float16 (2, 3) against torch.bfloat16 (3, 2)",
        ),
        (0.5, -0.0, "y: 0.5 is not -0.0"),
        ("a", None, "y: 'a' is not None"),
    ],
)
def test_messages(left, right, expected):
    assert message(left, right, "y") == expected


def test_message_index_of_a_strided_tensor_is_its_own():
    x = torch.arange(6.0).view(2, 3)
    y = x.clone()
    y[1, 0] = 9.0
    text = "the first at index (0, 1): 3.0 (0x40400000) against 9.0 (0x41100000)"
    assert text in message(x.t(), y.t())


def test_message_of_different_structures_names_what_only_one_has():
    text = message({"a": 1, "b": 2}, {"a": 1, "c": 3})
    assert text == "the structures differ: only one of the two has ['b'], ['c']"


def test_empty_and_zero_dim_tensors_compare():
    assert_bitwise_equal(torch.zeros(0, 3), torch.ones(0, 3))
    assert_bitwise_equal(torch.tensor(2.0), torch.tensor(2.0))
    assert_bitwise_equal({"a": [torch.ones(2), 3, None, "x"]}, {"a": (torch.ones(2), 3, None, "x")})


# --- what has no bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", (object(), {1, 2}, range(3), torch.eye(2).to_sparse()), ids=lambda x: type(x).__name__)
def test_leaves_whose_bytes_are_not_known_are_refused(leaf):
    with pytest.raises(TypeError):
        digest({"x": leaf})


def test_the_order_of_keys_is_not_compared():
    assert digest({"a": 1, "b": 2.0}) == digest({"b": 2.0, "a": 1})


def of_dtensors(tp_group):
    """Comparisons see this rank's part, without the others: here only one rank finds a difference."""
    mesh = DeviceMesh.from_group(tp_group, "cpu")
    local = torch.arange(8.0).view(4, 2) + tp_group.rank()
    one, other = (DTensor.from_local(local.clone(), mesh, [Shard(0)]) for _ in range(2))
    assert_bitwise_equal({"a": one}, {"a": other})
    assert_bitwise_equal(one, local)
    assert digest([one]) == digest([local])
    if tp_group.rank() == 1:
        other.to_local()[2, 1] += 1
        with pytest.raises(AssertionError, match=r"1 of 8 elements differ; the first at index \(2, 1\): 6.0"):
            assert_bitwise_equal(one, other)
        assert digest(one) != digest(other)


def test_dtensors():
    run_ranks(of_dtensors, 2, device="cpu")
