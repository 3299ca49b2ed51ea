"""The kernels that move bytes through peers' memory: on a CPU one rank at a time, the test doing what others would."""

import pytest
import torch
from cases import more

from tp_invariant.kernels import launch, peer_moves
from tp_invariant.kernels.peer_moves import (
    BLOCK,
    CHUNKS,
    EPOCHS,
    TAGS,
    VECTOR,
    blocks_of,
    gather_buffer_bytes,
    peer_gather,
    peer_read,
    read_buffer_bytes,
    slot_of,
)

interpreted = pytest.mark.skipif(not launch.interpreting(), reason="needs Triton's interpreter: no GPU here")


@pytest.fixture(autouse=True)
def few_chunks(monkeypatch):
    """The interpreter omits device_assert by default; without it a failing test hangs. And it is slow."""
    if launch.interpreting():
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
        for name, value in (("CHUNKS", 4), ("_VECTORS", 8)):
            monkeypatch.setattr(peer_moves, name, value)
        monkeypatch.setitem(globals(), "CHUNKS", 4)


def bytes_of(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8, generator=generator)
    return raw.view(torch.bfloat16)


def same(a, b):
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


# --- packets of a few bytes ---------------------------------------------------------------------------------------


class Packets:
    """The buffers of all ranks in this process; `rank` runs the kernel, and the test writes the others' packets."""

    def __init__(self, size, capacity, rank):
        self.size, self.capacity, self.rank = size, capacity, rank
        self.buffers = torch.zeros(size, gather_buffer_bytes(capacity, size) // 8, dtype=torch.int64)
        self.table = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.states = torch.zeros(blocks_of(capacity), dtype=torch.int32)

    def flags(self, words, tag):
        epochs = self.states.to(torch.int64).repeat_interleave(BLOCK)[:words]
        return (epochs + 1) * TAGS + tag, epochs % 2

    def half(self, at, words):
        return self.buffers[at].view(2, self.size, self.capacity)[:, :, :words]

    def send(self, source, x, tag):
        """The bytes that rank `source` would write to `rank`."""
        word = x.view(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        flags, halves = self.flags(len(word), tag)
        packets = (flags << 32) | word
        for half in range(2):
            self.half(self.rank, len(word))[half, source][halves == half] = packets[halves == half]

    def gather(self, xs, dim, tag=0, limit=3):
        for source, x in enumerate(xs):
            if source != self.rank:
                self.send(source, x, tag)
        x = xs[self.rank]
        out = torch.empty(x.shape[0], self.size * x.shape[1], dtype=x.dtype) if dim else x.new_empty(len(xs), *x.shape)
        return self.launch(x, out, x.shape[1] * x.element_size() if dim else x.nbytes, tag, limit)

    def launch(self, x, out, row, tag, limit=3):
        peers = dict(table=self.table, states=self.states, rank=self.rank, capacity=self.capacity)
        return peer_gather(x, out, row, tag, limit=limit, **peers)


@interpreted
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("dim", (0, 1))
def test_words_arrive_where_they_belong(size, dim):
    """Gathers of different sizes one after another, so that blocks have different epochs; with NaN payloads."""
    peers = Packets(size, 2 * BLOCK + 100, rank=1)
    for step, (rows, cols) in enumerate(((1, 2), (7, 30), (3, 680), (1, 2), (2, 1024), (4, 550))):
        xs = [bytes_of(10 * step + rank, rows, cols) for rank in range(size)]
        got = peers.gather(xs, dim, tag=step)
        assert same(got, torch.cat(xs, 1) if dim else torch.stack(xs))
    assert peers.states.tolist() == [6, 3, 1][: len(peers.states)]


@interpreted
def test_what_a_rank_writes_to_the_others():
    peers, x = Packets(3, BLOCK, rank=2), [bytes_of(rank, 1, 64) for rank in range(3)]
    for epoch in range(3):
        flags, _ = peers.flags(32, tag=5)
        peers.gather(x, 0, tag=5)
        word = x[2].view(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        for other in range(3):
            assert torch.equal(peers.half(other, 32)[epoch % 2, 2], (flags << 32) | word)
            assert not peers.half(other, BLOCK)[epoch % 2, 2, 32:].any()


# --- chunks of some MB ----------------------------------------------------------------------------------------------


class Chunks:
    """The buffers of all ranks in this process; `rank` runs the kernel, and the test does what the others would."""

    def __init__(self, size, nbytes, rank):
        self.size, self.rank, self.slot = size, rank, slot_of(nbytes, size)
        self.buffers = torch.zeros(size, read_buffer_bytes(self.slot, size), dtype=torch.uint8)
        self.table = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.states = torch.zeros(CHUNKS, dtype=torch.int32)

    def laid_down(self, at):
        """[half, chunk, bytes]"""
        return self.buffers[at][: 2 * CHUNKS * self.slot * VECTOR].view(2, CHUNKS, -1)

    def flags(self, at):
        """[half, chunk, rank]"""
        return self.buffers[at][2 * CHUNKS * self.slot * VECTOR :].view(torch.int32).view(2, CHUNKS, self.size)

    def pieces(self, x, blocks):
        """What a rank lays down: for each chunk its piece of each block, one after another."""
        of_blocks = x.contiguous().view(-1).view(torch.uint8).view(blocks, -1)
        piece = -(-of_blocks.shape[1] // VECTOR // CHUNKS) * VECTOR
        for chunk in range(CHUNKS):
            yield chunk, [(block * piece, b[chunk * piece : (chunk + 1) * piece]) for block, b in enumerate(of_blocks)]

    def send(self, source, x, blocks, tag):
        for chunk, parts in self.pieces(x, blocks):
            epoch = int(self.states[chunk])
            for at, part in parts:
                self.laid_down(source)[epoch % 2, chunk, at : at + len(part)] = part
            self.flags(self.rank)[epoch % 2, chunk, source] = (epoch + 1) * TAGS + tag

    def move(self, xs, blocks, side_by_side=False, tag=0, limit=3):
        for source, x in enumerate(xs):
            if source != self.rank:
                self.send(source, x, blocks, tag)
        x = xs[self.rank]
        out = torch.empty(len(xs) * x.numel() // blocks, dtype=x.dtype)
        row = x.shape[1] * x.element_size()
        return self.launch(x, out, blocks, row, side_by_side, tag, limit)

    def launch(self, x, out, blocks, row, side_by_side, tag, limit=3):
        peers = dict(table=self.table, states=self.states, rank=self.rank, slot=self.slot)
        return peer_read(x, out, blocks, row, side_by_side, tag, limit=limit, **peers)


def expected(xs, blocks, rank, side_by_side):
    parts = [x.chunk(blocks)[rank if blocks > 1 else 0] for x in xs]
    return torch.cat(parts, 1) if side_by_side else torch.stack(parts)


@interpreted
@pytest.mark.parametrize("size", (2, 3, more(4)))
@pytest.mark.parametrize("exchange", (False, True))
@pytest.mark.parametrize("side_by_side", (False, True))
def test_bytes_arrive_where_they_belong(size, exchange, side_by_side):
    """Moves of different sizes one after another, of whole x and of blocks, with NaN payloads."""
    peers, rank = Chunks(size, 2 * 12 * size * 264, rank=size - 1), size - 1
    for step, (rows, cols) in enumerate(((1, 8), (7, 24), (3, 136), (12, 264), (2, 8))):
        blocks = size if exchange else 1
        xs = [bytes_of(10 * step + source, rows * blocks, cols) for source in range(size)]
        got = peers.move(xs, blocks, side_by_side, tag=step)
        want = expected(xs, blocks, rank, side_by_side)
        assert torch.equal(got.view(torch.uint8), want.contiguous().view(-1).view(torch.uint8))
    assert peers.states.tolist() == [5] * CHUNKS


@interpreted
@pytest.mark.parametrize("blocks", (1, 3))
def test_what_a_rank_lays_down_and_tells(blocks):
    """In turn in the two halves; a block that is its own need not be there."""
    peers, xs = Chunks(3, 3 * 960, rank=2), [bytes_of(source, 6, 80) for source in range(3)]
    for epoch in range(3):
        peers.move(xs, blocks, tag=5)
        for chunk, parts in peers.pieces(xs[2], blocks):
            for block, (at, part) in enumerate(parts):
                if blocks == 1 or block != 2:
                    assert torch.equal(peers.laid_down(2)[epoch % 2, chunk, at : at + len(part)], part)
        for other in range(2):
            assert (peers.flags(other)[epoch % 2, :, 2] == (epoch + 1) * TAGS + 5).all()
            assert not peers.flags(other)[:, :, :2].any()


# --- what both wait for ---------------------------------------------------------------------------------------------


class Pair:
    """Two ranks of either kind that gather one row; `rank` 0 runs the kernel."""

    def __init__(self, kind):
        self.peers = Packets(2, BLOCK, rank=0) if kind is Packets else Chunks(2, 1024, rank=0)
        self.xs, self.kind = [bytes_of(rank, 1, 64) for rank in range(2)], kind

    def move(self, tag=0):
        if self.kind is Packets:
            return self.peers.gather(self.xs, 0, tag=tag)
        return self.peers.move(self.xs, 1, tag=tag)

    def send(self, tag):
        self.peers.send(1, self.xs[1], *([] if self.kind is Packets else [1]), tag=tag)

    def launch(self):
        if self.kind is Packets:
            return self.peers.launch(self.xs[0], self.xs[0].new_empty(2, 1, 64), self.xs[0].nbytes, 0)
        return self.peers.launch(self.xs[0], self.xs[0].new_empty(128), 1, 128, False, 0)


both_kinds = pytest.mark.parametrize("kind", (Packets, Chunks))


@interpreted
@both_kinds
@pytest.mark.parametrize("wrong", ("nothing sent", "tag", "epoch"))
def test_another_word_is_waited_for(kind, wrong):
    """Of the use before, of another one (a tag), of another epoch: none is taken; the wait times out."""
    pair = Pair(kind)
    pair.move()
    pair.move()
    if wrong == "tag":
        pair.send(tag=3)
    if wrong == "epoch":
        pair.peers.states += 2
        pair.send(tag=0)
        pair.peers.states -= 2
    with pytest.raises(Exception, match="a rank has not come to a collective"):
        pair.launch()


@interpreted
@both_kinds
def test_what_is_under_way_is_waited_for(kind):
    pair = Pair(kind)
    pair.peers.states.fill_(-1)
    with pytest.raises(Exception, match="another one on this GPU"):
        pair.launch()


@interpreted
@both_kinds
def test_epochs_and_tags_wrap_around(kind):
    pair = Pair(kind)
    for epoch in (0, EPOCHS - 2, EPOCHS - 1):
        pair.peers.states.fill_(epoch)
        assert same(pair.move(tag=TAGS - 1), torch.cat(pair.xs))
        assert set(pair.peers.states.tolist()) == {(epoch + 1) % EPOCHS}
