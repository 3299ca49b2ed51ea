"""Flags between GPUs that a CUDA graph can hold: kernels of one warp that tell peers, and wait for them.

A stream's own operations on flags (comm/copy_machine.py) carry numbers, which a graph would repeat. Here a counter in
the device's memory says how many times a buffer has been used, so each replay goes on where the one before ended:

    claim       waits until no other graph of this GPU has the buffer and all peers have freed its last use; counts one
    arrived     tells the peers that what this rank sends into their buffers is there: the count and a tag
    wait        until all peers have told this rank so, with the same count and the same tag
    free        tells the peers that this rank has read what is in its own; lets other graphs have the buffer

Words are int32, [kind, buffer, rank], one array at each rank: `words[kind, buffer, q]` is what rank q told this one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch_on, next_power_of_2
from .peer_moves import EPOCHS, TAGS
from .plans import Kernel

FREE, ARRIVED = 0, 1  # kinds
_FREE, _ARRIVED = tl.constexpr(FREE), tl.constexpr(ARRIVED)
_TAGS, _EPOCHS = tl.constexpr(TAGS), tl.constexpr(EPOCHS)

_LATE = tl.constexpr("tp_invariant: a rank has not come to a collective of this CUDA graph: see its log")


@triton.jit
def _flag(count, tag):
    return (count % _EPOCHS + 1) * _TAGS + tag


@triton.jit
def _tell(table_ptr, value, kind, buffer, buffers, rank, SIZE: tl.constexpr, PADDED: tl.constexpr, SEM: tl.constexpr):
    ranks = tl.arange(0, PADDED)
    others = (ranks < SIZE) & (ranks != rank)
    bases = tl.load(table_ptr + ranks, mask=others, other=0)
    words = (bases + ((kind * buffers + buffer) * SIZE + rank) * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(words, value + tl.zeros((PADDED,), tl.int32), mask=others, sem=SEM, scope="sys")


@triton.jit
def _until(words_ptr, value, kind, buffer, buffers, rank, limit, SIZE: tl.constexpr, PADDED: tl.constexpr):
    ranks = tl.arange(0, PADDED)
    others = (ranks < SIZE) & (ranks != rank)
    words = words_ptr + (kind * buffers + buffer) * SIZE + ranks
    looks = 0
    while tl.max(tl.where(others & (tl.load(words, mask=others, other=0, volatile=True) != value), 1, 0), 0) > 0:
        looks += 1
        tl.device_assert(looks < limit, _LATE)


_NUMBERS = ["words_ptr", "table_ptr", "counts_ptr", "locks_ptr", "buffer", "buffers", "rank", "tag", "limit"]


@triton.jit(debug=True, do_not_specialize=_NUMBERS)
def _claim_kernel(
    words_ptr, table_ptr, counts_ptr, locks_ptr, buffer, buffers, rank, tag, limit,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    looks = 0
    while tl.atomic_xchg(locks_ptr + buffer, 1, sem="acquire", scope="gpu") != 0:
        looks += 1
        tl.device_assert(looks < limit, "tp_invariant: another CUDA graph does not give its buffer back")
    count = tl.load(counts_ptr + buffer)
    _until(words_ptr, count, _FREE, buffer, buffers, rank, limit, SIZE, PADDED)
    tl.store(counts_ptr + buffer, (count + 1) & 0x3FFFFFFF)


@triton.jit(debug=True, do_not_specialize=_NUMBERS)
def _arrived_kernel(
    words_ptr, table_ptr, counts_ptr, locks_ptr, buffer, buffers, rank, tag, limit,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    value = _flag(tl.load(counts_ptr + buffer), tag)
    _tell(table_ptr, value, _ARRIVED, buffer, buffers, rank, SIZE, PADDED, "release")


@triton.jit(debug=True, do_not_specialize=_NUMBERS)
def _wait_kernel(
    words_ptr, table_ptr, counts_ptr, locks_ptr, buffer, buffers, rank, tag, limit,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    value = _flag(tl.load(counts_ptr + buffer), tag)
    _until(words_ptr, value, _ARRIVED, buffer, buffers, rank, limit, SIZE, PADDED)


@triton.jit(debug=True, do_not_specialize=_NUMBERS)
def _free_kernel(
    words_ptr, table_ptr, counts_ptr, locks_ptr, buffer, buffers, rank, tag, limit,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    # The kernels that read the buffer have ended, and nothing was written: there is nothing to release, for which the
    # stream would wait for a fence between devices.
    _tell(table_ptr, tl.load(counts_ptr + buffer), _FREE, buffer, buffers, rank, SIZE, PADDED, "relaxed")
    tl.atomic_xchg(locks_ptr + buffer, 0, sem="release", scope="gpu")


_KERNELS = {
    operation: Kernel(kernel, num_warps=1, num_stages=1, sanitize_overflow=False)
    for operation, kernel in (
        ("claim", _claim_kernel), ("arrived", _arrived_kernel), ("wait", _wait_kernel), ("free", _free_kernel),
    )
}  # fmt: skip


def peer_flags(
    operation: str, buffer: int, tag: int, words: Tensor, table: Tensor, counts: Tensor, locks: Tensor, rank: int,
    limit: int,
) -> None:  # fmt: skip
    """One of the operations above, on the current stream of the words' device.

    Args:
        tag: 0 to TAGS - 1, of this use of the buffer.
        words: [2, buffers, P], int32, this rank's, zeros at first.
        table: [P], int64: where each rank's words are, as this process sees them.
        counts, locks: [buffers], int32, this rank's, zeros at first.
        limit: after how many looks (about a microsecond each) a wait fails an assertion.
    """
    size = table.shape[0]
    with launch_on(words, "peer_flags"):
        _KERNELS[operation](
            words.device.index, (1,),
            (words, table, counts, locks, buffer, counts.shape[0], rank, tag, limit), (size, next_power_of_2(size)),
        )  # fmt: skip
