"""Peer copies inside CUDA graphs: the protocol replayed on simulated streams; the flags' kernels; on GPUs the bytes."""

import random
from unittest import mock

import pytest
import torch
from gpus import on_gpus
from simulated_ranks import Corrupt, SimMachine, Stuck, World, program, read, write

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm import peer_copies
from tp_invariant.comm.collectives import resolve_group, start_exchange_rows, start_gather_dim, start_gather_major
from tp_invariant.comm.copy_protocol import CapturedCopies, Flag
from tp_invariant.comm.peer_copies import copies_of
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.kernels import launch, peer_flags
from tp_invariant.testing import assert_bitwise_equal, gpu_ranks, run_ranks

SHARED = torch.cuda.device_count() < gpu_ranks()

# --- simulated graphs -----------------------------------------------------------------------------------------------


class SimGraphMachine(SimMachine):
    """Flags that are counted when they run, not when they are launched."""

    def __init__(self, world, rank, size, without):
        super().__init__(world, rank, size, without)
        self.counts, self.locks, self.captures = {}, {}, 0

    def capture(self):
        return self.captures

    def flags(self, stream, buffer, number, *, tell=None, until=None):
        peers = [peer for peer in range(self.size) if peer != self.rank]
        words, tag = self.world.words, None if "tags" in self.without else number

        def claim():
            while self.locks.get(buffer) and "locks" not in self.without:
                yield "blocked"
            self.locks[buffer] = True
            count = self.counts.get(buffer, 0)
            while any(words[self.rank].get((Flag.FREE, buffer, peer), 0) != count for peer in peers):
                if "until FREE" in self.without:
                    break
                yield "blocked"
            self.counts[buffer] = count + 1

        def wait():
            value = self.counts[buffer], tag
            while any(words[self.rank].get((Flag.ARRIVED, buffer, peer)) != value for peer in peers):
                if "until ARRIVED" in self.without:
                    break
                yield "blocked"

        def write(kind):
            for peer in peers:
                count = self.counts[buffer]
                words[peer][kind, buffer, self.rank] = count if kind == Flag.FREE else (count, tag)
                yield "stepped"
            if kind == Flag.FREE:
                self.locks[buffer] = False

        self.put(stream, claim() if until == Flag.FREE else wait() if until is not None else write(tell))

    def join(self):
        """Orders all later launches on any stream after all earlier ones: a graph after the previous graph."""
        streams = [*self.computes, *self.lanes]
        for i, stream in enumerate(streams):
            self.mark(("join", i), stream)
        for stream in streams:
            for i, other in enumerate(streams):
                if other != stream:
                    self.after(stream, ("join", i))


def replays(world, machine, copies, graphs, order):
    """A rank's program: `order` of graphs, each replayed as it was captured."""
    for replay, graph in enumerate(order):
        calls, first_tag = graphs[graph], 1000 * graph
        copies._number = first_tag  # as when it was captured
        for buffer in copies._buffers:
            buffer.number, buffer.lent, buffer.released_on = 0, False, None
        started = {}
        for kind, n, *rest in calls:
            yield "stepped"
            if kind == "start":
                sent, early, stream = rest
                machine.on = machine.computes[stream]
                source = [None] * max(begin + count for begin, count in sent)
                values = [(graph, replay, n, machine.rank, i) for i in range(len(source))]
                machine.put(machine.on, write(source, values))
                started[n] = copies.start(source, sent, early), sent, source
                continue
            stream, _, releases_on = rest
            machine.on = machine.computes[stream]
            lease, sent, source = started.pop(n)
            assert lease is not None
            lease.wait()
            begin, count = sent[machine.rank]
            want = [(graph, replay, n, rank, begin + i) for rank in range(machine.size) for i in range(count)]
            machine.put(machine.on, read(world, machine.rank, lease.index, want))
            machine.put(machine.on, write(source, ["another"] * len(source)))
            machine.on = machine.computes[releases_on]
            lease.release()
        machine.join()


def simulate(size, seed, orders, without=()):
    """Two graphs, replayed by each rank in its order of `orders`."""
    world = World(size, seed)
    graphs = [program(seed, size), program(seed + 1000, size)]
    machines = [SimGraphMachine(world, rank, size, without) for rank in range(size)]
    for rank, machine in enumerate(machines):
        copies = CapturedCopies(machine, limit=2**40)
        copies.provide(1, 4)
        world.hosts.append(replays(world, machine, copies, graphs, orders[rank]))
    world.run()
    return machines


@pytest.mark.parametrize("size", (2, 3, 4))
def test_every_replay_reads_its_own_bytes(size):
    for seed in range(24 // size):
        machines = simulate(size, seed, [(0, 0, 1, 0, 1, 1)] * size)
        assert all(sum(machine.counts.values()) >= 60 and not any(machine.locks.values()) for machine in machines)


@pytest.mark.parametrize("wait", ("until FREE", "until ARRIVED"))
def test_each_wait_is_needed(wait):
    failed = 0
    for seed in range(8):
        try:
            simulate(3, seed, [(0, 0, 1)] * 3, without=(wait,))
        except (Corrupt, Stuck):
            failed += 1
    assert failed > 4


def test_graphs_in_another_order_hang_and_never_read_wrong_bytes():
    """The tags detect it: without them other graphs' bytes are read."""
    found = {"tags": 0, "none": 0}
    for seed in range(10):
        with pytest.raises(Stuck):
            simulate(2, seed, [(0, 1), (1, 0)])
        try:
            simulate(2, seed, [(0, 1), (1, 0)], without=("tags",))
        except (Corrupt, Stuck) as error:
            found["tags"] += isinstance(error, Corrupt)
    assert found["tags"] > 5


def test_a_new_capture_finds_all_buffers_free():
    machine = SimGraphMachine(World(2, 0), 0, 2, ())
    copies = CapturedCopies(machine, limit=2**40)
    assert copies.start([], [(0, 1)] * 2, False) is None, "nothing is allocated in a capture"
    copies.provide(1, 2)
    leases = [copies.start([], [(0, 1)] * 2, False) for _ in range(3)]
    assert [lease is None for lease in leases] == [False, False, True]
    machine.captures += 1  # the capture failed before they were released
    assert copies.start([], [(0, 1)] * 2, False) is not None


# --- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not launch.interpreting(), reason="needs Triton's interpreter: no GPU here")
def test_the_kernels(monkeypatch):
    """Two ranks in turn: three uses of a buffer; then each wait times out, because its word is missing."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
    words = torch.zeros(2, 2, 4, 2, dtype=torch.int32)  # of rank; kind, buffer, rank
    table = torch.tensor([words[0].data_ptr(), words[1].data_ptr()])
    counts, locks = torch.zeros(2, 2, 4, dtype=torch.int32)

    def do(operation, rank, tag=0, buffer=2):
        peer_flags.peer_flags(operation, buffer, tag, words[rank], table, counts[rank], locks[rank], rank, 3)

    for use in range(3):
        for operation in ("claim", "arrived", "wait", "free"):
            for rank in range(2):
                do(operation, rank, tag=use)
    assert counts[:, 2].tolist() == [3, 3]
    assert not locks.any()
    assert words[:, :, 2].tolist() == [
        [[0, 3], [0, 4 * peer_flags.TAGS + 2]],
        [[3, 0], [4 * peer_flags.TAGS + 2, 0]],
    ]
    assert not words[:, :, [0, 1, 3]].any()
    do("claim", 0)
    with pytest.raises(Exception, match="another CUDA graph does not give its buffer back"):
        do("claim", 0)
    with pytest.raises(Exception, match="has not come"):  # rank 1 has sent nothing
        do("wait", 0)
    do("claim", 1)
    do("arrived", 1, tag=5)
    with pytest.raises(Exception, match="has not come"):  # it has sent another collective's
        do("wait", 0, tag=4)
    do("wait", 0, tag=5)
    do("free", 0)
    with pytest.raises(Exception, match="has not come"):  # rank 1 has not read its last
        do("claim", 0)


# --- on GPUs --------------------------------------------------------------------------------------------------------


def rounds_in_a_graph(tp_group):
    """Gathers and exchanges, several in flight, in a graph of two streams that is replayed with new values."""
    group = resolve_group(tp_group)
    late, choose = random.Random(group.rank), random.Random(0)
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = [8 * (n % 3) for n in range(group.size)]
    xs = [torch.zeros(sum(sizes), 1000 * (n + 1), device=device, dtype=torch.bfloat16) for n in range(4)]
    results, side, graph = [], torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def all_of_it():
        flying = []
        for n in range(12):
            x, early = xs[n % 4], n % 3 == 0
            if n % 2:
                flying.append((n, peer_copies.start_gather_major(x, group, early=early)))
            else:
                flying.append((n, peer_copies.start_exchange_rows(x, sizes, group, early=early)))
            while len(flying) > choose.randrange(3):
                n, lent = flying.pop(choose.randrange(len(flying)))
                assert lent is not None
                if n % 4 == 1:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        results.append((n, lent.wait().clone()))
                        lent.release()
                    torch.cuda.current_stream().wait_stream(side)
                else:
                    results.append((n, lent.wait().clone()))
                    lent.release()
        for n, lent in flying:
            results.append((n, lent.wait().clone()))
            lent.release()

    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="copy_engine"):
        peer_copies.prepare_for_graphs(group, device)
        state = choose.getstate()
        all_of_it()
        peer_copies.prepare_for_graphs(group, device)
        torch.cuda.synchronize()
        results.clear()
        choose.setstate(state)
        before = copies_of(group, device).captured.started  # in graphs of other tests
        with torch.cuda.graph(graph):
            all_of_it()
        started = copies_of(group, device).captured.started - before
        for replay in range(30):
            for n, x in enumerate(xs):
                x.copy_(torch.randn(x.shape, device=device, generator=_generator(100 * replay + n, group.rank)))
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(5_000_000))
            graph.replay()
            torch.cuda.synchronize()
            for n, got in results:
                x = xs[n % 4]
                want = start_gather_major(x, group) if n % 2 else start_exchange_rows(x, sizes, group)
                assert_bitwise_equal(got, want.wait())
    return started


def _generator(seed, rank):
    return torch.Generator("cuda").manual_seed(1000 * seed + rank)


@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
def test_graphs_hold_copies(ranks):
    assert run_ranks(rounds_in_a_graph, ranks, device="cuda") == [12] * ranks


def captured_steps(tp_group, choice):
    """Two MLPs' training steps from one graph: outputs and gradients, and the number of copies in the graph."""
    group = resolve_group(tp_group)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    options = dict(tp_group=tp_group, sequence_parallel=True, owner_map="rows", dtype=torch.bfloat16, device="cuda")
    model = torch.nn.Sequential(
        *(
            layer
            for _ in range(3)
            for layer in (
                tpi.LayerNormLinear(1024, 4096, parallel_mode="column", **options),
                tpi.Linear(4096, 1024, parallel_mode="row", **options),
            )
        )
    )
    x = torch.randn(1536, 1024, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    x = x.chunk(group.size)[group.rank].clone().requires_grad_()
    graph, results = torch.cuda.CUDAGraph(), []

    def step():
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]

    with (
        mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=choice),
        mock.patch.object(peer_copies, "MIN_BYTES", 2**18),
        mock.patch.object(weight_cache, "ahead_in_graphs", True),
        tpi.set_tp_invariant_mode(True),
    ):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                eager = [t.detach().clone() for t in step()]
            torch.cuda.synchronize()
            started = 0
            if choice == "auto" and group.size > 1:
                started = copies_of(group, device).captured.started
            with torch.cuda.graph(graph, stream=stream):
                outputs = step()
            if choice == "auto" and group.size > 1:
                started = copies_of(group, device).captured.started - started
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            assert_bitwise_equal([t.detach() for t in outputs], eager)
            with torch.no_grad():
                x.mul_(-0.5)
            graph.replay()
            results = [t.detach().clone() for t in outputs]
        torch.cuda.synchronize()
        weight_cache.clear()
    parts = [testing.digest([start_gather_dim(results[i], 0, group).wait()]) for i in range(2)]
    return parts, started


@pytest.mark.skipif(SHARED, reason="what finds no buffer goes by gloo, which no graph holds")
@pytest.mark.parametrize("ranks", on_gpus(2, 4, 8))
def test_a_captured_step_has_the_same_bits(ranks):
    ((want, _),) = run_ranks(captured_steps, 1, "nccl", device="cuda")
    for choice in ("nccl", "auto"):
        for got, started in run_ranks(captured_steps, ranks, choice, device="cuda"):
            assert got == want
            assert started > 6 if choice == "auto" else started == 0, started  # more than one for each layer
