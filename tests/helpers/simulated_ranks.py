"""Ranks, streams and memory in simulation, for the tests of peer copies."""

from __future__ import annotations

import random
from collections import deque


class Corrupt(AssertionError):
    """A collective read bytes of another one."""


class Stuck(AssertionError):
    """No host and no stream can make a step."""


class SimStream:
    def __init__(self, name):
        self.name, self.queue, self.marks = name, deque(), 0


class World:
    """The ranks' memories, flags and streams; `run` executes hosts and streams in small steps in a random order."""

    def __init__(self, size, seed, one_queue=False):
        self.random, self.one_queue = random.Random(seed), one_queue
        self.memory = [{} for _ in range(size)]  # buffer -> its cells
        self.words = [{} for _ in range(size)]
        self.streams = []
        self.hosts = []
        self.steps = 0

    def run(self):
        while True:
            heads = []
            for host in self.hosts:
                heads.append((None, host))
            for stream in self.streams:
                if stream.queue:
                    heads.append((stream, stream.queue[0]))
            self.random.shuffle(heads)
            if not any(self._step(stream, head) for stream, head in heads):
                if any(stream.queue for stream in self.streams):
                    raise Stuck
                return

    def _step(self, stream, head):
        """One step of the first that can make one."""
        done = next(head, "end")
        if done == "blocked":
            return False
        self.steps += 1
        if done == "end":
            self.hosts.remove(head) if stream is None else stream.queue.popleft()
        return True


class SimMachine:
    """peer_copies.Machine; `without` names what it omits, to show that the tests notice it."""

    def __init__(self, world, rank, size, without):
        self.world, self.rank, self.size, self.without = world, rank, size, without
        first = SimStream(("compute", rank))
        self.computes = [first, SimStream(("compute", rank))]
        self.lanes = [SimStream(("lane", rank)), SimStream(("lane", rank))]
        self.hardware = {s: first if world.one_queue else s for s in [*self.computes, *self.lanes]}
        world.streams += dict.fromkeys(self.hardware.values())
        self.on = first
        self.buffers = 0
        self.marks = {}
        self.copied = 0

    def put(self, stream, operation):
        self.hardware[stream].queue.append(operation)

    def current(self):
        return self.on

    def lane(self, early):
        return self.lanes[early]

    def mark(self, buffer, stream):
        mark = self.marks[buffer] = {"passed": False, "of": stream}

        def pass_it():
            mark["passed"] = True
            yield "stepped"

        self.put(stream, pass_it())

    def follow(self, stream, other):
        self.mark("now", other)
        self.after(stream, "now")

    def after(self, stream, buffer):
        mark = self.marks[buffer]  # as it is at the launch: what is marked later is nothing to this wait
        if f"{stream.name[0]} after {mark['of'].name[0]}" in self.without:
            return

        def wait():
            while not mark["passed"]:
                yield "blocked"

        self.put(stream, wait())

    def new_buffer(self, nbytes):
        for memory in self.world.memory:  # a peer that is ahead may write before this rank comes here
            memory.setdefault(self.buffers, {})
        self.buffers += 1
        return True

    def copy(self, stream, buffer, source, blocks):
        def move(peer, offset, begin, nbytes):
            for i in range(nbytes):
                self.world.memory[peer][buffer][offset + i] = source[begin + i]
                yield "stepped"

        for block in blocks:
            self.copied += block[-1]
            self.put(stream, move(*block))

    def flags(self, stream, buffer, number, *, tell=None, until=None):
        peers = [peer for peer in range(self.size) if peer != self.rank]

        def write():
            for peer in peers:
                self.world.words[peer][tell, buffer, self.rank] = number
                yield "stepped"

        def wait():
            while any(self.world.words[self.rank].get((until, buffer, peer), 0) != number for peer in peers):
                yield "blocked"

        if tell is not None and f"tell {tell.name}" not in self.without:
            self.put(stream, write())
        if until is not None and f"until {until.name}" not in self.without:
            self.put(stream, wait())


def write(source, values):
    for i, value in enumerate(values):
        source[i] = value
        yield "stepped"


def read(world, rank, buffer, want):
    """A GEMM: reads its input once and, later, again."""
    for _ in range(2):
        for i, value in enumerate(want):
            if world.memory[rank][buffer].get(i) != value:
                raise Corrupt(f"rank {rank}: cell {i} of buffer {buffer}")
            yield "stepped"


def program(seed, size, length=14):
    """The same for every rank: collectives that are started, and used later in another order, on several streams."""
    choose = random.Random(seed)
    calls, open_ = [], []
    for n in range(length):
        if choose.random() < 0.4:
            sent, begin = [], 0
            for _ in range(size):  # an exchange, some of whose ranks get nothing
                sent.append((begin, choose.randrange(4)))
                begin += sent[-1][1]
        else:
            sent = [(0, choose.randint(1, 4))] * size
        calls.append(("start", n, sent, choose.random() < 0.5, choose.randrange(2)))
        open_.append(n)
        while open_ and (len(open_) > 3 or choose.random() < 0.5):
            calls.append(
                (
                    "use",
                    open_.pop(choose.randrange(len(open_))),
                    choose.randrange(2),
                    choose.random() < 0.9,
                    choose.randrange(2),
                )
            )
    return [*calls, *(("use", n, 0, True, 1) for n in open_)]


def host(world, machine, copies, calls, forgets=None):
    """A rank's program. `forgets`: a collective that it does not release."""
    started = {}
    for call in calls:
        yield "stepped"
        kind, n, *rest = call
        if kind == "start":
            sent, early, stream = rest
            machine.on = machine.computes[stream]
            total = max(begin + count for begin, count in sent)
            source = [None] * total
            machine.put(machine.on, write(source, [(n, machine.rank, i) for i in range(total)]))
            started[n] = copies.start(source, sent, early), sent, source
            continue
        stream, reads, releases_on = rest
        machine.on = machine.computes[stream]
        lease, sent, source = started.pop(n)
        if lease is None:
            continue
        if reads:
            lease.wait()
            begin, count = sent[machine.rank]
            want = [(n, rank, begin + i) for rank in range(machine.size) for i in range(count)]
            machine.put(machine.on, read(world, machine.rank, lease.index, want))
            machine.put(machine.on, write(source, ["another"] * len(source)))  # its memory is free
        machine.on = machine.computes[releases_on]
        if n != forgets:
            lease.release()
