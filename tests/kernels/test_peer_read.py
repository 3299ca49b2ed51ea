"""The kernel that gathers and exchanges some MB by reading its peers' memory: on a CPU one rank at a time."""

import pytest
import torch

from tp_invariant.kernels import launch
from tp_invariant.kernels.peer_gather import EPOCHS, TAGS
from tp_invariant.kernels.peer_read import CHUNKS, VECTOR, PeerRead, buffer_bytes, slot_of

interpreted = pytest.mark.skipif(not launch.interpreting(), reason="needs Triton's interpreter: no GPU here")


@pytest.fixture(autouse=True)
def few_chunks(monkeypatch):
    """The interpreter omits device_assert by default; without it a failing test hangs. And it is slow."""
    if launch.interpreting():
        from triton.runtime import interpreter

        from tp_invariant.kernels import peer_read as module

        monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
        for name, value in (("CHUNKS", 4), ("_BLOCK", 8)):
            monkeypatch.setattr(module, name, value)
        monkeypatch.setitem(globals(), "CHUNKS", 4)
        module._launch.cache_clear()
        yield
        module._launch.cache_clear()
    else:
        yield


class Peers:
    """The buffers of all ranks in this process; `rank` runs the kernel, and the test does what the others would."""

    def __init__(self, size, nbytes, rank):
        self.size, self.rank, self.slot = size, rank, slot_of(nbytes, size)
        self.buffers = torch.zeros(size, buffer_bytes(self.slot, size), dtype=torch.uint8)
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
        return PeerRead(self.table, self.states, self.rank, self.slot, limit)(x, out, blocks, row, side_by_side, tag)


def bytes_of(seed, rows, cols):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, 2 * cols), dtype=torch.uint8, generator=generator).view(torch.bfloat16)


def expected(xs, blocks, rank, side_by_side):
    parts = [x.chunk(blocks)[rank if blocks > 1 else 0] for x in xs]
    return torch.cat(parts, 1) if side_by_side else torch.stack(parts)


@interpreted
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("exchange", (False, True))
@pytest.mark.parametrize("side_by_side", (False, True))
def test_bytes_arrive_where_they_belong(size, exchange, side_by_side):
    """Moves of different sizes one after another, of whole x and of blocks, with NaN payloads."""
    peers, rank = Peers(size, 2 * 12 * size * 264, rank=size - 1), size - 1
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
    peers, xs = Peers(3, 3 * 960, rank=2), [bytes_of(source, 6, 80) for source in range(3)]
    for epoch in range(3):
        peers.move(xs, blocks, tag=5)
        for chunk, parts in peers.pieces(xs[2], blocks):
            for block, (at, part) in enumerate(parts):
                if blocks == 1 or block != 2:
                    assert torch.equal(peers.laid_down(2)[epoch % 2, chunk, at : at + len(part)], part)
        for other in range(2):
            assert (peers.flags(other)[epoch % 2, :, 2] == (epoch + 1) * TAGS + 5).all()
            assert not peers.flags(other)[:, :, :2].any()


@interpreted
def test_another_flag_is_waited_for():
    """Flags of the use before, of another one (a tag), of another epoch: none is taken; the wait times out."""
    for wrong in ("nothing sent", "tag", "epoch"):
        peers, xs = Peers(2, 1024, rank=0), [bytes_of(source, 1, 64) for source in range(2)]
        peers.move(xs, 1)
        peers.move(xs, 1)
        if wrong == "tag":
            peers.send(1, xs[1], 1, tag=3)
        if wrong == "epoch":
            peers.states += 2
            peers.send(1, xs[1], 1, tag=0)
            peers.states -= 2
        out = xs[0].new_empty(128)
        with pytest.raises(Exception, match="a rank has not come to a collective"):
            PeerRead(peers.table, peers.states, 0, peers.slot, 3)(xs[0], out, 1, 128, False, 0)


@interpreted
def test_a_chunk_under_way_is_waited_for():
    peers, xs = Peers(2, 1024, rank=0), [bytes_of(source, 1, 64) for source in range(2)]
    peers.states.fill_(-1)
    with pytest.raises(Exception, match="another one on this GPU"):
        PeerRead(peers.table, peers.states, 0, peers.slot, 3)(xs[0], xs[0].new_empty(128), 1, 128, False, 0)


@interpreted
def test_epochs_and_tags_wrap_around():
    peers, xs = Peers(2, 1024, rank=0), [bytes_of(source, 1, 64) for source in range(2)]
    for epoch in (0, EPOCHS - 2, EPOCHS - 1):
        peers.states.fill_(epoch)
        got = peers.move(xs, 1, tag=TAGS - 1)
        assert torch.equal(got.view(torch.uint8), torch.cat(xs).view(-1).view(torch.uint8))
        assert peers.states.tolist() == [(epoch + 1) % EPOCHS] * CHUNKS
