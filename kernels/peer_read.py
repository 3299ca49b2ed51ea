"""Gathers and exchanges of some MB, as one kernel that reads its peers' memory: for what a layer has to wait for.

Each rank lays what the others need into a buffer of its own, tells them so, and reads what they have laid into theirs
straight into the result. On four H100s NCCL takes 1.2 to 2.3 times as long for a gather, 1.0 to 1.3 times for an
exchange, and 1.7 times as long on the host. Nothing is added, so nothing is rounded.

    chunks      A program of the kernel moves one chunk, of every block, by itself: it lays down its part, tells the
                programs of the same number at the peers, and reads from those alone.
    epoch       Each chunk counts its uses by itself: its number, in `states`, makes the flag and says which of two
                halves of the buffer is written. A rank writes to a half again after it has had the peers' flags of the
                use between, which they sent after they had read this one. Flags have two halves for the same reason.
    lock, tag, limit    As in peer_gather.py.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch_on, next_power_of_2
from .peer_gather import EPOCHS, TAGS, words_of

VECTOR = 16  # bytes that a thread moves at a time
CHUNKS = 128
_BLOCK = 1024  # vectors of a program at a time
_WARPS = 16
_MAX_KNOWN = 1024
_TAGS, _EPOCHS = tl.constexpr(TAGS), tl.constexpr(EPOCHS)


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
    epoch = tl.atomic_xchg(state, -1, sem="acquire", scope="gpu")
    looks = 0
    while epoch < 0:  # another kernel of this GPU has it
        looks += 1
        tl.device_assert(looks < limit, "tp_invariant: a gather waits for another one on this GPU that does not end")
        epoch = tl.atomic_xchg(state, -1, sem="acquire", scope="gpu")
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


@functools.cache
def _launch(index: int | None, size: int, blocks: int) -> Launch:
    return Launch(_read_kernel, CHUNKS, num_warps=_WARPS, num_stages=1, sanitize_overflow=False)


def slot_of(nbytes: int, size: int) -> int:
    """Vectors that a buffer must hold for each chunk and half, so that a rank can send `nbytes`, in blocks or whole."""
    return -(-nbytes // (VECTOR * CHUNKS)) + size


def buffer_bytes(slot: int, size: int) -> int:
    """Of a rank's buffer: two halves of chunks, and their flags."""
    return 2 * CHUNKS * (slot * VECTOR + size * 4)


class PeerRead:
    """The kernel for one table of buffers, with what does not change from call to call at hand.

    Args:
        table: [P], int64: where each rank's buffer of `buffer_bytes(slot, P)` bytes is, zeros at first, as this process
            sees them.
        states: [CHUNKS], int32, this rank's, zeros at first; one for each table.
        slot: `slot_of` at least as many bytes as any x has. The same on all ranks, as is:
        limit: after how many looks (about a microsecond each) the kernel gives up.
    """

    def __init__(self, table: Tensor, states: Tensor, rank: int, slot: int, limit: int) -> None:
        self._table, self._states = table, states
        self._rank, self._size, self._slot, self._limit = rank, table.shape[0], slot, limit
        self._addresses = table.data_ptr(), states.data_ptr()
        self._index = table.get_device() if table.is_cuda else None
        self._known: dict[tuple, tuple] = {}  # by sizes: the launch, and the numbers before and after the tag

    def __call__(self, x: Tensor, out: Tensor, blocks: int, row: int, side_by_side: bool, tag: int) -> Tensor:
        """Every rank's x, or its block of x that is this rank's, in `out`; on the current stream of x's device.

        Args:
            x: contiguous, at an address that is a multiple of 16. The same shape on all ranks.
            out: contiguous: what P ranks send, one after another, or with `side_by_side` the rows of all side by side.
            blocks: 1, all of x for everybody; or P, blocks of equal size, one for each rank.
            row: bytes of a row of x, of which a block has a whole number. A multiple of 16.
            tag: 0 to TAGS - 1, the same on all ranks.
        """
        key = x.nbytes, blocks, row, side_by_side
        launch, before, after = self._known.get(key) or self._find(key)
        with launch_on(x, "peer_read"):
            if launch.direct:
                launch(self._index, x.data_ptr(), out.data_ptr(), *self._addresses, *before, tag, *after)
            else:
                launch(self._index, words_of(x), words_of(out), self._table, self._states, *before, tag, *after)
        return out

    def _find(self, key: tuple) -> tuple:
        nbytes, blocks, row, side_by_side = key
        size, vectors, row = self._size, nbytes // blocks // VECTOR, row // VECTOR
        places = (row, size * row, row) if side_by_side else (max(vectors, 1), 0, vectors)
        before = self._rank, vectors, *places, self._slot
        after = self._limit, size, next_power_of_2(size), blocks, CHUNKS, _BLOCK
        if len(self._known) >= _MAX_KNOWN:  # sizes that change all the time
            self._known.clear()
        found = self._known[key] = _launch(self._index, size, blocks), before, after
        return found
