"""Registered buffers: who gets which, on gloo with ordinary memory in place of NCCL's; on GPUs their bytes."""

from __future__ import annotations

import contextlib
import itertools
import random
from unittest import mock

import pytest
import torch

from tp_invariant.comm import peer_copies, symmetric, wire
from tp_invariant.comm.collectives import exchange_rows, gather_major, resolve_group
from tp_invariant.comm.symmetric import PER_CLASS, Buffers, CapturedBuffers, Channel, Channels, size_class
from tp_invariant.testing import assert_bitwise_equal, run_ranks

CPU = torch.device("cpu")
MEBI = 2**20
GPUS = torch.cuda.device_count()
ON_GPUS = [
    pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs")]) for n in (2, 4)
]


def memory(nbytes):
    return torch.full((nbytes,), 0xEE, dtype=torch.uint8)


class Stream:
    """Of what a lease asks of a stream."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


def release(buffer, stream):
    buffer.leased, buffer.released_on = False, stream


# --- which buffer ----------------------------------------------------------------------------------------------------


def test_a_released_buffer_is_taken_again_the_oldest_first():
    buffers, stream = Buffers(memory, 100 * MEBI), Stream()
    first, second = buffers.lease(3 * MEBI, stream), buffers.lease(3 * MEBI, stream)
    assert first is not second and first.memory.nbytes == second.memory.nbytes == size_class(3 * MEBI)
    release(second, stream)
    release(first, stream)
    assert [buffers.lease(3 * MEBI, stream) for _ in range(2)] == [first, second]
    assert not stream.waited_for, "one stream is in order with itself"
    release(first, stream)
    other = Stream()
    assert buffers.lease(3 * MEBI, other) is first
    assert other.waited_for == [stream]


def test_a_buffer_of_twice_the_size_serves_and_a_larger_one_does_not():
    buffers, stream = Buffers(memory, 100 * MEBI), Stream()
    large = buffers.lease(8 * MEBI, stream)
    release(large, stream)
    assert buffers.lease(4 * MEBI, stream) is large
    release(large, stream)
    assert buffers.lease(2 * MEBI, stream) is not large


def test_no_more_than_there_may_be():
    buffers, stream = Buffers(memory, 100 * MEBI), Stream()
    taken = [buffers.lease(MEBI, stream) for _ in range(PER_CLASS + 1)]
    assert None not in taken[:PER_CLASS] and taken[PER_CLASS] is None and buffers.refused == 1
    buffers = Buffers(memory, 5 * MEBI)
    assert buffers.lease(4 * MEBI, stream) is not None
    assert buffers.lease(2 * MEBI, stream) is None
    asked = []
    buffers = Buffers(asked.append, 100 * MEBI)  # append returns None: a rank has no memory
    assert buffers.lease(MEBI, stream) is None and buffers.lease(MEBI, stream) is None
    assert len(asked) == 1, "ranks are not asked again and again"


def test_captures_have_buffers_of_their_own_and_make_none():
    channel = Channel(mock.Mock(size=2), CPU, Buffers(memory, 100 * MEBI))
    stream = Stream()
    outside = [channel.buffers.lease(nbytes, stream) for nbytes in (MEBI, MEBI, 9 * MEBI)]
    channel.prepare_for_graphs()
    inside = channel.captured
    assert isinstance(inside, CapturedBuffers)
    assert sorted(b.memory.nbytes for b in inside.buffers) == sorted(b.memory.nbytes for b in outside)
    inside.begin(1)
    taken = [inside.lease(MEBI, stream) for _ in range(3)]
    assert None not in taken[:2] and taken[2] is None and not {id(b) for b in taken[:2]} & {id(b) for b in outside}
    inside.begin(1)
    assert inside.lease(MEBI, stream) is None, "the same capture"
    inside.begin(2)
    assert inside.lease(MEBI, stream) is taken[0], "what the capture before left leased is free"
    with mock.patch.object(symmetric, "is_capturing", lambda: True):
        channel.captured = None
        assert channel.start_gather(torch.ones(4), (2, 4)) is None, "nothing was prepared"


# --- bytes -----------------------------------------------------------------------------------------------------------


def program(tp_group, seed):
    """Random gathers and exchanges, up to four under way; how many found no buffer, and which the others took."""
    group, device = resolve_group(tp_group), torch.device(tp_group_device(tp_group))
    draw = random.Random(seed)  # the same on every rank
    if device.type == "cuda":
        channels = symmetric.channels_of(group, device)
        assert isinstance(channels, Channels), channels
    else:
        channels = Channels(
            Channel(group, CPU, Buffers(memory, 64 * MEBI)), Channel(group, CPU, Buffers(memory, 9 * MEBI))
        )
    under_way, took, plain = [], [], 0
    for step in range(40):
        dtype = draw.choice([torch.bfloat16, torch.float32, torch.uint8])
        columns, rows = draw.choice([1, 7, 64]), draw.choice([1, 5, 300, 4000])
        exchanged, early = draw.random() < 0.5, draw.random() < 0.5
        shape = (group.size * rows, columns) if exchanged else (rows, columns)
        data = torch.Generator().manual_seed(1000 * seed + 10 * step + group.rank)
        x = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=data)
        x = x.view(dtype).view(shape).to(device)
        channel = channels.of(early)
        if exchanged:
            expected = exchange_rows(x, [rows] * group.size, group)
            pending = channel.start_exchange(x, tuple(expected.shape))
        else:
            expected = gather_major(x, group)
            pending = channel.start_gather(x, tuple(expected.shape))
        x.fill_(0)  # in order with the stream: what was sent is what was there
        if pending is None:
            plain += 1
        else:
            took.append([id(b) for b in pending._buffers])
            under_way.append((pending, expected))
        most = draw.choice([0, 2, 4])
        while len(under_way) > most:
            pending, expected = under_way.pop(draw.randrange(len(under_way)))
            if draw.random() < 0.8:
                assert_bitwise_equal(pending.wait(), expected)
            pending.release()
    for pending, _ in under_way:
        pending.release()
    names = {number: place for place, number in enumerate(dict.fromkeys(itertools.chain(*took)))}
    return plain, [[names[number] for number in taken] for taken in took]


def tp_group_device(tp_group):
    return f"cuda:{torch.cuda.current_device()}" if torch.distributed.get_backend(tp_group) == "nccl" else "cpu"


@pytest.mark.parametrize("world", (2, 3, 4))
def test_bytes_are_those_of_plain_collectives(world):
    """And every rank takes the same buffers; some find none, as too many are under way."""
    for seed in range(4):
        results = run_ranks(program, world, seed)
        assert all(result == results[0] for result in results)
        plain, took = results[0]
        assert 0 < plain < 20 and len(took) > 20


@pytest.mark.parametrize("world", ON_GPUS)
def test_on_gpus(world):
    for seed in range(4):
        results = run_ranks(program, world, seed, device="cuda")
        assert all(result == results[0] for result in results)


def test_a_result_is_not_read_after_its_release():
    def on_rank(tp_group):
        channel = Channel(resolve_group(tp_group), CPU, Buffers(memory, 64 * MEBI))
        pending = channel.start_gather(torch.ones(3), (2, 3))
        pending.release()  # which waits first, so that the next use of the buffer comes after this one's bytes
        assert pending.waited
        pending._read_on.clear()
        with pytest.raises(AssertionError, match="after it was released"):
            pending.wait()
        return True

    assert run_ranks(on_rank, 2) == [True, True]


# --- who has it ------------------------------------------------------------------------------------------------------


def test_without_nccl_there_are_none_and_the_variable_says_so():
    def on_rank(tp_group):
        group = resolve_group(tp_group)
        with mock.patch.dict("os.environ", {peer_copies.TRANSPORT_VARIABLE: "symmetric"}):
            try:
                peer_copies.start_gather(torch.ones(4), group)
            except RuntimeError as error:
                return str(error)

    for text in run_ranks(on_rank, 2):
        assert "TP_INVARIANT_TRANSPORT=symmetric" in text and "the tensors are on cpu (rank 0)" in text
        assert "Set it to auto or nccl on all ranks" in text


@pytest.mark.parametrize(
    "version, another, has, reason",
    [
        ((2, 27, 5), True, True, "NCCL is 2.27.5"),
        ((2, 28, 9), False, True, "the group is not on NCCL"),
        ((2, 28, 9), True, False, "does not register memory"),
        ((2, 28, 9), True, True, None),
    ],
)
def test_why_not(monkeypatch, version, another, has, reason):
    backend = mock.Mock(spec=["register_mem_pool"] if has else [])
    group = mock.Mock()
    group.process_group._get_backend = lambda device: backend
    monkeypatch.setattr(symmetric, "can_duplicate", lambda group: another)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    found = symmetric.why_not(group, torch.device("cuda", 0))
    assert found is None if reason is None else reason in found


def test_ranks_on_several_hosts_have_none():
    def on_rank(tp_group):
        group = resolve_group(tp_group)
        with (
            mock.patch.object(symmetric, "why_not", lambda group, device: None),
            mock.patch.object(symmetric, "_host", lambda: f"host {group.rank}"),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: mock.Mock(total_memory=2**36)),
        ):
            return symmetric.connect(group, torch.device("cuda", 0))

    assert run_ranks(on_rank, 2) == ["its ranks are on several hosts"] * 2


def test_memory_that_one_rank_lacks_no_rank_gets():
    def on_rank(tp_group):
        group = resolve_group(tp_group)
        backend = mock.Mock()
        fake = mock.Mock(process_group=mock.Mock(_get_backend=lambda device: backend))
        gather = wire.gather_objects

        @contextlib.contextmanager
        def pool(*args):
            if group.rank == 1:
                raise torch.OutOfMemoryError("out of memory")
            yield

        with (
            mock.patch.object(wire, "gather_objects", lambda own, _: gather(own, group)),
            mock.patch.object(torch.cuda, "MemPool"),
            mock.patch.object(torch.cuda, "use_mem_pool", pool),
            mock.patch.object(torch.cuda, "empty_cache"),
        ):
            return symmetric._allocator(fake, CPU, [])(MEBI) is None, backend.register_mem_pool.call_count

    assert run_ranks(on_rank, 2) == [(True, 0)] * 2
