"""A tensor's bytes, a digest of nested containers of tensors, and a comparison that reports what differs."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .dtensors import local_of

# leaves whose repr is complete; empty containers are leaves, see `leaves`
_PLAIN = (bool, int, complex, str, bytes, list, tuple, dict, torch.dtype, torch.device)

_BLOCK = 2**24  # elements hashed at once: 128 MiB for each of a few temporary tensors
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# splitmix64 (Steele, Lea, Flood 2014): odd constants of a bijection of 64-bit integers, here as signed ones
_STEP, _MIX1, _MIX2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements (of a DTensor's local ones), row-major: uint8 [numel, itemsize], on the CPU."""
    tensor = local_of(tensor)
    # a clone, because contiguous() leaves a single element's odd stride, which view(dtype) refuses
    if tensor.layout != torch.strided:
        raise TypeError(f"a {tensor.layout} tensor has no bytes in row-major order: compare tensor.to_dense()")
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def leaves(obj: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """(name, leaf) for each leaf of nested mappings, sequences and dataclasses; names as in an expression: [0]['x'].

    Of a DTensor it is this rank's part: what looks at a leaf must not wait for other ranks, which may not look.
    """
    if isinstance(obj, (Mapping, list, tuple)) and not obj:
        yield name or "value", obj  # an empty container is a leaf, so that it is compared too
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            yield from leaves(value, f"{name}[{index}]")
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield from leaves(getattr(obj, field.name), f"{name}.{field.name}")
    else:
        yield name or "value", local_of(obj)


def digest(obj: Any) -> str:
    """SHA-256, as 64 hex digits, of everything in `obj`: structure, dtypes, shapes and raw bytes of its tensors.

    -0.0 and 0.0 differ, and so do NaNs with different payloads. Strides, devices and the order of a mapping's keys have
    no effect. Of a DTensor it sees this rank's part, as a plain tensor.

    Raises:
        TypeError: a leaf that is not a tensor, number, string, bytes, dtype, device or None.
    """
    sha = hashlib.sha256()
    for name, leaf in sorted(leaves(obj), key=lambda named: named[0]):
        sha.update(f"{name}|".encode())
        if isinstance(leaf, Tensor):
            sha.update(f"{leaf.dtype}|{tuple(leaf.shape)}|".encode())
            data = raw_bytes(leaf)
            sha.update(ctypes.string_at(data.data_ptr(), data.numel()) if data.numel() else b"")
        elif isinstance(leaf, float):
            sha.update(leaf.hex().encode())
        elif leaf is None or isinstance(leaf, _PLAIN):
            sha.update(f"{type(leaf).__name__} {leaf!r}".encode())
        else:
            raise TypeError(
                f"{name} is a {type(leaf).__name__}, whose bytes are not known here: make it a tensor, number or string"
            )
        sha.update(b"|")
    return sha.hexdigest()


def assert_bitwise_equal(actual: Any, expected: Any, name: str = "") -> None:
    """Asserts that two nested containers of tensors (or plain values) have equal bytes, dtype and shape at every leaf.

    Of a DTensor it sees this rank's part, as a plain tensor.

    Raises:
        AssertionError: names the first leaf that differs, the number of differing elements, and the index, both values
            and both bit patterns of the first one.
    """
    assert_leaves_equal(dict(leaves(actual, name)), dict(leaves(expected, name)))


def assert_leaves_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """`assert_bitwise_equal` for the results of `leaves`."""
    if got.keys() != want.keys():
        only = sorted(got.keys() ^ want.keys())
        raise AssertionError(f"the structures differ: only one of the two has {', '.join(only[:5])}")
    for name, left in got.items():
        _assert_leaf_equal(left, want[name], name)


def _assert_leaf_equal(left: Any, right: Any, name: str) -> None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        if digest(left) != digest(right):
            raise AssertionError(f"{name}: {left!r} is not {right!r}")
        return
    if left.dtype != right.dtype or left.shape != right.shape:
        raise AssertionError(
            f"{name}: dtype or shape: {left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)}"
        )
    left_bytes, right_bytes = raw_bytes(left), raw_bytes(right)
    differs = (left_bytes != right_bytes).any(dim=1)
    count = int(differs.sum())
    if count == 0:
        return
    first = int(differs.to(torch.uint8).argmax())
    index = tuple(int(place) for place in torch.unravel_index(torch.tensor(first, device="cpu"), left.shape))
    values = [t.detach().cpu().contiguous().reshape(-1)[first].item() for t in (left, right)]
    bits = ["0x" + bytes(b[first].tolist()[::-1]).hex() for b in (left_bytes, right_bytes)]
    raise AssertionError(
        f"{name}: {count} of {left.numel()} elements differ; the first at index {index}: "
        f"{values[0]!r} ({bits[0]}) against {values[1]!r} ({bits[1]})"
    )


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finalizer, in place. Torch shifts arithmetically: the mask drops the copies of the sign."""
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
        z.bitwise_xor_((z >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if factor is not None:
            z.mul_(factor)
    return z


def tensor_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the tensor's bytes, never 0: int64, 0-dim, on its device. 0 for a tensor without values."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    tensor = tensor.resolve_conj().resolve_neg()  # such a view's bytes are those of another value
    rows = slice_hashes(tensor if tensor.dim() else tensor.reshape(1), 0)
    return slice_hashes(rows.unsqueeze(0), 0)[0].bitwise_or_(1)


def slice_hashes(tensor: Tensor, dim: int) -> Tensor:
    """A 64-bit hash of the slice at each index of `dim`: int64 [tensor.shape[dim]], on the tensor's device.

    A slice's hash depends on its raw bytes and their order. It is the wrapping sum, exact in any order, of the slice's
    words, each mixed with its position. It detects accidental differences; it is not cryptographic.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    rows = tensor.view(_INTEGERS[size]).movedim(dim, 0)
    rows = rows.reshape(rows.shape[0], rows[:1].numel())
    if rows.shape[1] * size % 8 == 0:  # elements that make up whole 64-bit words are hashed as such
        flat = rows.reshape(-1)
        flat = flat.clone() if flat.storage_offset() * size % 8 else flat
        rows = flat.view(torch.int64).view(rows.shape[0], rows.shape[1] * size // 8)
    places = torch.arange(1, rows.shape[1] + 1, device=rows.device) * _STEP
    blocks = rows.split(max(1, _BLOCK // max(1, rows.shape[1])))
    return torch.cat([_mix(block.long() ^ places).sum(dim=1) for block in blocks])
