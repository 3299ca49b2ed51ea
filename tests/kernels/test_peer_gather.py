"""The kernel that gathers a few bytes through its peers' memory: on a CPU one rank at a time, with prepared packets."""

import pytest
import torch

from tp_invariant.kernels import launch
from tp_invariant.kernels.peer_gather import BLOCK, EPOCHS, TAGS, PeerGather, blocks_of, buffer_bytes

interpreted = pytest.mark.skipif(not launch.interpreting(), reason="needs Triton's interpreter: no GPU here")


@pytest.fixture(autouse=True)
def assertions(monkeypatch):
    """The interpreter omits device_assert by default; without it a failing test hangs."""
    if launch.interpreting():
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))


class Peers:
    """The buffers of all ranks in this process; `rank` runs the kernel, and the test writes the others' packets."""

    def __init__(self, size, capacity, rank):
        self.size, self.capacity, self.rank = size, capacity, rank
        self.buffers = torch.zeros(size, buffer_bytes(capacity, size) // 8, dtype=torch.int64)
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
        return PeerGather(self.table, self.states, self.rank, self.capacity, limit)(x, out, dim, tag)


def bytes_of(seed, *shape):
    x = torch.randint(
        0, 256, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return x.view(torch.bfloat16)


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@interpreted
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("dim", (0, 1))
def test_words_arrive_where_they_belong(size, dim):
    """Gathers of different sizes one after another, so that blocks have different epochs; with NaN payloads."""
    peers = Peers(size, 2 * BLOCK + 100, rank=1)
    for step, (rows, cols) in enumerate(((1, 2), (7, 30), (3, 680), (1, 2), (2, 1024), (4, 550))):
        xs = [bytes_of(10 * step + rank, rows, cols) for rank in range(size)]
        got = peers.gather(xs, dim, tag=step)
        assert same(got, torch.cat(xs, 1) if dim else torch.stack(xs))
    assert peers.states.tolist() == [6, 3, 1][: len(peers.states)]


@interpreted
def test_what_a_rank_writes_to_the_others():
    peers, x = Peers(3, BLOCK, rank=2), [bytes_of(rank, 1, 64) for rank in range(3)]
    for epoch in range(3):
        flags, _ = peers.flags(32, tag=5)
        peers.gather(x, 0, tag=5)
        word = x[2].view(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        for other in range(3):
            assert torch.equal(peers.half(other, 32)[epoch % 2, 2], (flags << 32) | word)
            assert not peers.half(other, BLOCK)[epoch % 2, 2, 32:].any()


@interpreted
def test_another_flag_is_waited_for():
    """Words of the gather before, of another gather (a tag), of another epoch: none is taken; the wait times out."""
    for wrong in ("nothing sent", "tag", "epoch"):
        peers, xs = Peers(2, BLOCK, rank=0), [bytes_of(rank, 1, 64) for rank in range(2)]
        peers.gather(xs, 0)
        peers.gather(xs, 0)
        if wrong == "tag":
            peers.send(1, xs[1], tag=3)
        if wrong == "epoch":
            peers.states += 2
            peers.send(1, xs[1], tag=0)
            peers.states -= 2
        out = xs[0].new_empty(2, *xs[0].shape)
        with pytest.raises(Exception, match="a rank has not come to a gather"):
            PeerGather(peers.table, peers.states, 0, peers.capacity, 3)(xs[0], out, 0, 0)


@interpreted
def test_a_block_under_way_is_waited_for():
    peers, xs = Peers(2, BLOCK, rank=0), [bytes_of(rank, 1, 64) for rank in range(2)]
    peers.states.fill_(-1)
    with pytest.raises(Exception, match="another one on this GPU"):
        PeerGather(peers.table, peers.states, 0, BLOCK, 3)(xs[0], xs[0].new_empty(2, *xs[0].shape), 0, 0)


@interpreted
def test_epochs_and_tags_wrap_around():
    peers, xs = Peers(2, BLOCK, rank=0), [bytes_of(rank, 1, 64) for rank in range(2)]
    for epoch in (0, EPOCHS - 2, EPOCHS - 1):
        peers.states.fill_(epoch)
        assert same(peers.gather(xs, 0, tag=TAGS - 1), torch.stack(xs))
        assert peers.states.tolist() == [(epoch + 1) % EPOCHS]
