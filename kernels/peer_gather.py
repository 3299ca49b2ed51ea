"""A gather of a few bytes, as one kernel that writes into its peers' memory: for decoding, where NCCL's latency is all.

Each rank writes its words into a buffer at every rank and reads what the others wrote into its own. A word travels as
a packet of 8 bytes, itself and a flag, that a GPU writes and reads at once: so no fence stands between data and flag,
and what has arrived says so itself (the idea of NCCL's LL protocol). Nothing is added, so nothing is rounded.

    epoch       Each block of words counts its uses by itself: its number, in `states`, makes the flag and says which
                of two halves of the buffer is written. A rank writes to a half again after it has read the other from
                all, which they sent after they had read this one. So no half is overwritten before it is read, on
                whatever streams, and no replay of a CUDA graph needs anything of the host.
    lock        `states` holds -1 while a block is under way, so that two gathers on one GPU do not mix.
    tag         Part of the flag. Gathers that ranks make in another order never read each other's words: they wait.
    limit       After so many looks the kernel fails an assertion, which ends the process's CUDA context, rather than
                wait for a dead rank for ever.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch_on, next_power_of_2

BLOCK = 512  # words of a block
TAGS = 2**12
EPOCHS = 2**19 - 2  # even, as halves take turns; with TAGS and one more, so that no flag is 0, 31 bits
_TAGS, _EPOCHS = tl.constexpr(TAGS), tl.constexpr(EPOCHS)

_WARPS = 8
_MAX_KNOWN = 1024


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
    epoch = tl.atomic_xchg(state, -1, sem="acquire", scope="gpu")
    looks = 0
    while epoch < 0:  # another gather of this GPU has it
        looks += 1
        tl.device_assert(looks < limit, "tp_invariant: a gather waits for another one on this GPU that does not end")
        epoch = tl.atomic_xchg(state, -1, sem="acquire", scope="gpu")
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
        tl.device_assert(looks < limit, "tp_invariant: a rank has not come to a gather: see its log")
        got = tl.load(mine, mask=wanted, other=0, volatile=True)

    row = at // row_words
    col = at - row * row_words
    tl.store(out_ptr + (row * out_row + col)[None, :] + ranks * out_rank, got.to(tl.int32), mask=wanted)
    tl.debug_barrier()
    tl.atomic_xchg(state, (epoch + 1) % _EPOCHS, sem="release", scope="gpu")


@functools.cache
def _launch(index: int | None, size: int) -> Launch:
    return Launch(_gather_kernel, num_warps=_WARPS, num_stages=1, sanitize_overflow=False)


def words_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)


def buffer_bytes(capacity: int, size: int) -> int:
    """Of a rank's buffer: two halves, packets of every rank."""
    return 2 * size * capacity * 8


def blocks_of(words: int) -> int:
    return -(-words // BLOCK)


class PeerGather:
    """The kernel for one table of buffers, with what does not change from call to call at hand.

    Args:
        table: [P], int64: where each rank's buffer of `buffer_bytes(capacity, P)` bytes is, zeros at first, as this
            process sees them.
        states: [blocks_of(capacity)], int32, this rank's, zeros at first; one for each table.
        capacity: words that the buffer has room for, of each rank. The same on all ranks, as is:
        limit: after how many looks (about a microsecond each) the kernel gives up.
    """

    def __init__(self, table: Tensor, states: Tensor, rank: int, capacity: int, limit: int) -> None:
        self._table, self._states = table, states
        self._rank, self._size, self._capacity, self._limit = rank, table.shape[0], capacity, limit
        self._addresses = table.data_ptr(), states.data_ptr()
        self._index = table.get_device() if table.is_cuda else None
        self._launch = _launch(self._index, self._size)
        self._known: dict[tuple, tuple] = {}  # by sizes: the numbers before and after the tag, and the grid

    def __call__(self, x: Tensor, out: Tensor, dim: int, tag: int) -> Tensor:
        """Every rank's x in `out`, on the current stream of x's device.

        Args:
            x: [R, C] (dim 1) or any shape (dim 0), contiguous; C, or all of it, a multiple of 4 bytes; at most
                `capacity` words.
            out: P times x, contiguous: [R, P C] (dim 1), the ranks' columns side by side, or rank-major (dim 0).
            dim: along which the ranks' x stand.
            tag: 0 to TAGS - 1, the same on all ranks.
        """
        key = x.nbytes, x.nbytes if dim == 0 else x.shape[1] * x.element_size()
        before, after, grid = self._known.get(key) or self._find(*key)
        launch, index = self._launch, self._index
        with launch_on(x, "peer_gather"):
            if launch.direct:
                launch(index, x.data_ptr(), out.data_ptr(), *self._addresses, *before, tag, *after, grid=grid)
            else:
                tensors = words_of(x), words_of(out), self._table, self._states
                launch(index, *tensors, *before, tag, *after, grid=grid)
        return out

    def _find(self, nbytes: int, row_bytes: int) -> tuple:
        size, words, row = self._size, nbytes // 4, row_bytes // 4
        places = (words, 0, words) if row == words else (row, size * row, row)
        before = self._rank, words, *places, self._capacity
        after = self._limit, size, next_power_of_2(size), BLOCK
        if len(self._known) >= _MAX_KNOWN:  # sizes that change all the time
            self._known.clear()
        found = self._known[nbytes, row_bytes] = before, after, (blocks_of(words), 1, 1)
        return found
