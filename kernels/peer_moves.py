"""Gathers and exchanges as one kernel on the current stream, which reads or writes the memory of other GPUs.

`peer_gather` is for a few bytes, as in decoding, where NCCL's latency is all. Each rank writes its words into a buffer
at every rank and reads what the others wrote into its own. A word travels as a packet of 8 bytes, itself and a flag,
that a GPU writes and reads at once: so no fence stands between data and flag (the idea of NCCL's LL protocol).

`peer_read` is for some MB that a layer has to wait for. Each rank lays what the others need into a buffer of its own,
tells them so, and reads what they have laid into theirs straight into the result. A program of the kernel moves one
chunk, of every block, by itself, and waits for the programs of the same number at the peers alone. On four H100s NCCL
takes 1.2 to 2.3 times as long for a gather, and 1.0 to 1.3 times for an exchange.

Nothing is added, so nothing is rounded. Of both:

    epoch       Each block of words, or chunk, counts its uses by itself: its number, in `states`, makes the flag and
                says which of two halves of the buffer is written. A rank writes to a half again after it has had the
                peers' flags of the use between, which they sent after they had read this one. So no half is overwritten
                before it is read, on whatever streams, and a replay of a CUDA graph needs nothing of the host.
    lock        `states` holds -1 while a block is under way, so that two kernels on one GPU do not mix.
    tag         Part of the flag. Kernels that ranks run in another order never read each other's bytes: they wait.
    limit       After so many looks, of about a microsecond each, the kernel fails an assertion, which ends the
                process's CUDA context, rather than wait for a dead rank for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch_on, next_power_of_2
from .plans import Kernel, Launch, planned

TAGS = 2**12
EPOCHS = 2**19 - 2  # even, as halves take turns; with TAGS and one more, so that no flag is 0, 31 bits
_TAGS, _EPOCHS = tl.constexpr(TAGS), tl.constexpr(EPOCHS)

BLOCK = 512  # words of a block of peer_gather
VECTOR = 16  # bytes that a thread of peer_read moves at a time
CHUNKS = 128
_VECTORS = 1024  # of a program of peer_read at a time


@triton.jit
def _lock(state, limit):
    """The epoch of the block that this program now has for itself."""
    epoch = tl.atomic_xchg(state, -1, sem="acquire", scope="gpu")
    looks = 0
    while epoch < 0:
        looks += 1
        tl.device_assert(looks < limit, "tp_invariant: a gather waits for another one on this GPU that does not end")
        epoch = tl.atomic_xchg(state, -1, sem="acquire", scope="gpu")
    return epoch


@triton.jit(
    debug=True,  # keeps the assertion
    do_not_specialize=[
        "x_ptr", "out_ptr", "table_ptr", "states_ptr", "rank", "words", "row_words", "out_row", "out_rank", "capacity",
        "tag", "limit",
    ],
)  # fmt: skip
def _gather_kernel(
    x_ptr, out_ptr, table_ptr, states_ptr, rank, words, row_words, out_row, out_rank, capacity, tag, limit,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    state = states_ptr + block
    epoch = _lock(state, limit)
    flag = (epoch + 1) * _TAGS + tag  # never 0, which the buffer holds at first

    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    word = tl.load(x_ptr + at, mask=inside, other=0)
    packet = (flag.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)

    ranks = tl.arange(0, PADDED)[:, None]
    wanted = inside[None, :] & (ranks < SIZE)
    half = (epoch % 2) * SIZE
    bases = tl.load(table_ptr + ranks, mask=ranks < SIZE, other=0)
    theirs = bases + ((half + rank) * capacity + at).to(tl.int64)[None, :] * 8
    tl.store(theirs.to(tl.pointer_type(tl.int64)), tl.broadcast_to(packet[None, :], (PADDED, BLOCK)), mask=wanted)

    own = tl.load(table_ptr + rank)
    mine = (own + ((half + ranks) * capacity + at[None, :]).to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
    got = tl.load(mine, mask=wanted, other=0, volatile=True)
    looks = 0
    while tl.max(tl.max(tl.where(wanted & ((got >> 32).to(tl.int32) != flag), 1, 0), 1), 0) > 0:
        looks += 1
        tl.device_assert(looks < limit, "tp_invariant: a rank has not come to a collective: see its log")
        got = tl.load(mine, mask=wanted, other=0, volatile=True)

    row = at // row_words
    col = at - row * row_words
    tl.store(out_ptr + (row * out_row + col)[None, :] + ranks * out_rank, got.to(tl.int32), mask=wanted)
    tl.debug_barrier()
    tl.atomic_xchg(state, (epoch + 1) % _EPOCHS, sem="release", scope="gpu")


@triton.jit
def _place_in_result(vector, row, out_row, out_rank, rank):
    """Where a vector of rank's block stands, in words."""
    at = vector // row
    return (at * out_row + (vector - at * row) + rank * out_rank) * 4


@triton.jit(
    debug=True,  # keeps the assertions
    # x and out are always at multiples of 16
    do_not_specialize=[
        "table_ptr", "states_ptr", "rank", "vectors", "row", "out_row", "out_rank", "slot", "tag", "limit",
    ],
)  # fmt: skip
def _read_kernel(
    x_ptr, out_ptr, table_ptr, states_ptr, rank, vectors, row, out_row, out_rank, slot, tag, limit,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    state = states_ptr + chunk
    epoch = _lock(state, limit)
    flag = (epoch + 1) * _TAGS + tag  # never 0, which the buffer holds at first
    use = (epoch % 2) * CHUNKS + chunk

    piece = (vectors + CHUNKS - 1) // CHUNKS
    first = chunk * piece
    last = tl.minimum(first + piece, vectors)
    lanes = tl.arange(0, BLOCK)[:, None]
    word = tl.arange(0, 4)[None, :]
    own = tl.load(table_ptr + rank)
    slots = use.to(tl.int64) * slot * 16  # bytes from the beginning of a buffer
    mine = tl.multiple_of((own + slots).to(tl.pointer_type(tl.int32)), 16)

    for block in range(BLOCKS):
        for start in range(0, piece, BLOCK):
            vector = first + start + lanes
            inside = vector < last
            words = tl.load(x_ptr + (block * vectors + vector) * 4 + word, mask=inside, other=0)
            if BLOCKS == 1 or block != rank:
                tl.store(mine + (block * piece + start + lanes) * 4 + word, words, mask=inside)
            if BLOCKS == 1 or block == rank:
                tl.store(out_ptr + _place_in_result(vector, row, out_row, out_rank, rank) + word, words, mask=inside)
    tl.debug_barrier()

    flags = tl.cast(2 * CHUNKS, tl.int64) * slot * 16 + use * SIZE * 4
    ranks = tl.arange(0, PADDED)
    others = (ranks < SIZE) & (ranks != rank)
    bases = tl.load(table_ptr + ranks, mask=others, other=0)
    theirs = (bases + flags + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs, flag + tl.zeros((PADDED,), tl.int32), mask=others, sem="release", scope="sys")

    source = 0 if BLOCKS == 1 else rank * piece
    for step in range(1, SIZE):  # in each step every rank is read by one
        peer = (rank + step) % SIZE
        told = (own + flags + peer * 4).to(tl.pointer_type(tl.int32))
        looks = 0
        while tl.atomic_add(told, 0, sem="acquire", scope="sys") != flag:
            looks += 1
            tl.device_assert(looks < limit, "tp_invariant: a rank has not come to a collective: see its log")
        tl.debug_barrier()
        base = tl.load(table_ptr + peer)
        there = tl.multiple_of((base + slots).to(tl.pointer_type(tl.int32)), 16)
        for start in range(0, piece, BLOCK):
            vector = first + start + lanes
            inside = vector < last
            words = tl.load(there + (source + start + lanes) * 4 + word, mask=inside, other=0, cache_modifier=".cg")
            tl.store(out_ptr + _place_in_result(vector, row, out_row, out_rank, peer) + word, words, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(state, (epoch + 1) % _EPOCHS, sem="release", scope="gpu")


_gather = Kernel(_gather_kernel, num_warps=8, num_stages=1, sanitize_overflow=False)
_read = Kernel(_read_kernel, num_warps=16, num_stages=1, sanitize_overflow=False)


def _launch(launch: Launch, x: Tensor, out: Tensor, *args: Any) -> None:
    if launch.compiled is None:  # for 32-bit words, of which its later calls take the addresses alone
        launch_on(x, "a move between peers")
        x, out = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    launch(x, out, *args)


# --- a few bytes ----------------------------------------------------------------------------------------------------


def blocks_of(words: int) -> int:
    return -(-words // BLOCK)


def gather_buffer_bytes(capacity: int, size: int) -> int:
    """Of a rank's buffer for peer_gather: two halves, packets of every rank."""
    return 2 * size * capacity * 8


def peer_gather(
    x: Tensor, out: Tensor, row: int, tag: int, *, table: Tensor, states: Tensor, rank: int, capacity: int, limit: int
) -> Tensor:
    """Every rank's x in `out`, on the current stream of x's device.

    Args:
        x: contiguous, at most `capacity` words.
        out: contiguous, P times x: with rows of all ranks side by side, which is rank-major if x is one row.
        row: bytes of a row of x, a multiple of 4 that divides x's.
        tag: 0 to TAGS - 1, the same on all ranks.
        table: [P], int64: where each rank's buffer of `gather_buffer_bytes(capacity, P)` bytes is, zeros at first, as
            this process sees them.
        states: [blocks_of(capacity)], int32, this rank's, zeros at first; one for each table.
        capacity: words that the buffer has room for, of each rank. The same on all ranks, as is `limit`.
    """
    size, words, row = table.shape[0], x.nbytes // 4, row // 4
    places = (words, 0, words) if row == words else (row, size * row, row)
    numbers = rank, words, *places, capacity, tag, limit
    _launch(_gather_launch(x.get_device(), blocks_of(words), size), x, out, table, states, *numbers)
    return out


@planned
def _gather_launch(device_index: int, blocks: int, size: int) -> Launch:
    return Launch(_gather, device_index, (blocks,), (size, next_power_of_2(size), BLOCK))


# --- some MB --------------------------------------------------------------------------------------------------------


def slot_of(nbytes: int, size: int) -> int:
    """Vectors that a buffer must hold for each chunk and half, so that a rank can send `nbytes`, in blocks or whole."""
    return -(-nbytes // (VECTOR * CHUNKS)) + size


def read_buffer_bytes(slot: int, size: int) -> int:
    """Of a rank's buffer for peer_read: two halves of chunks, and their flags."""
    return 2 * CHUNKS * (slot * VECTOR + size * 4)


def peer_read(
    x: Tensor, out: Tensor, blocks: int, row: int, side_by_side: bool, tag: int, *, table: Tensor, states: Tensor,
    rank: int, slot: int, limit: int,
) -> Tensor:  # fmt: skip
    """Every rank's x, or its block of x that is this rank's, in `out`; on the current stream of x's device.

    Args:
        x: contiguous, at an address that is a multiple of 16. The same shape on all ranks.
        out: contiguous: what P ranks send, one after another, or with `side_by_side` the rows of all side by side.
        blocks: 1, all of x for everybody; or P, blocks of equal size, one for each rank.
        row: bytes of a row of x, of which a block has a whole number. A multiple of 16.
        tag: 0 to TAGS - 1, the same on all ranks.
        table: [P], int64: where each rank's buffer of `read_buffer_bytes(slot, P)` bytes is, zeros at first, as this
            process sees them.
        states: [CHUNKS], int32, this rank's, zeros at first; one for each table.
        slot: `slot_of` at least as many bytes as any x has. The same on all ranks, as is `limit`.
    """
    size, vectors, row = table.shape[0], x.nbytes // blocks // VECTOR, row // VECTOR
    places = (row, size * row, row) if side_by_side else (max(vectors, 1), 0, vectors)
    numbers = rank, vectors, *places, slot, tag, limit
    _launch(_read_launch(x.get_device(), size, blocks), x, out, table, states, *numbers)
    return out


@planned
def _read_launch(device_index: int, size: int, blocks: int) -> Launch:
    return Launch(_read, device_index, (CHUNKS,), (size, next_power_of_2(size), blocks, CHUNKS, _VECTORS))
