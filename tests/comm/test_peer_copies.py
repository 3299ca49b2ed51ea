"""Peer copies: their protocol on simulated streams in many interleavings; what chooses them; on GPUs their bytes."""

from __future__ import annotations

import ctypes
import importlib
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from gpus import on_gpus
from simulated_ranks import Corrupt, SimMachine, Stuck, World, host, program

import tp_invariant as tpi
from tp_invariant.comm import collectives, copy_machine, peer_copies, peer_memory
from tp_invariant.comm.collectives import (
    Group,
    Pending,
    resolve_group,
    start_exchange_rows,
    start_gather_dim,
    start_gather_major,
)
from tp_invariant.comm.copy_protocol import PER_SIZE, Flag, PeerCopies, size_class
from tp_invariant.comm.peer_copies import copies_of
from tp_invariant.comm.peer_memory import transport
from tp_invariant.core import torch_private
from tp_invariant.core.torch_graphs import torch_graph
from tp_invariant.gemm import weights as gemm_weights
from tp_invariant.gemm.weights import WeightCache, WeightLayout, weight_cache
from tp_invariant.testing import assert_bitwise_equal, digest, run_ranks, wide_randn

# --- simulated ranks ------------------------------------------------------------------------------------------------


def simulate(size, seed, without=(), one_queue=False, forgetful=None):
    """Runs all ranks to their end; returns the machines, and the ranks' PeerCopies."""
    world = World(size, seed, one_queue)
    calls = program(seed, size)
    machines = [SimMachine(world, rank, size, without) for rank in range(size)]
    copies = [PeerCopies(machine, limit=2**40) for machine in machines]
    for machine, own in zip(machines, copies, strict=True):
        forgets = 2 if machine.rank == forgetful else None
        world.hosts.append(host(world, machine, own, calls, forgets))
    world.run()
    return machines, copies


@pytest.mark.parametrize("one_queue", (False, True), ids=("streams", "one-queue"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_every_interleaving_reads_its_own_bytes(size, one_queue):
    """Nothing is overwritten before it is read, nothing is read before it has arrived, and there is no deadlock."""
    for seed in range(60 // size):
        machines, copies = simulate(size, seed, one_queue=one_queue)
        assert all(own.started >= 10 for own in copies)
        assert all(machine.copied > 0 for machine in machines)
        assert max(machine.buffers for machine in machines) <= PER_SIZE


WAITS = ("until FREE", "until ARRIVED", "lane after compute", "compute after lane", "compute after compute")


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait):
    failed = 0
    for seed in range(20):
        try:
            simulate(3, seed, without=(wait,))
        except (Corrupt, Stuck):
            failed += 1
    assert failed > 3, f"without `{wait}` the interleavings are as good as with it"


@pytest.mark.parametrize("word", ("tell FREE", "tell ARRIVED"))
def test_a_copy_whose_flag_is_missing_is_waited_for(word):
    with pytest.raises(Stuck):
        simulate(3, 0, without=(word,))


def test_ranks_that_differ_hang_and_never_read_wrong_bytes():
    """One rank omits a release, so that it uses other buffers from then on."""
    stuck = 0
    for seed in range(20):
        try:
            simulate(3, seed, forgetful=1)
        except Stuck:
            stuck += 1
    assert stuck > 10


# --- buffers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", (1, 2**21, 2**21 + 1, 50 * 2**20 - 1, 201326592, 2**30 + 1))
def test_sizes_of_buffers(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(1.25 * nbytes, 2**21) or size - nbytes < 2**21
    assert size % 2**21 == 0
    assert size_class(size) == size


def idle_copies(limit):
    world = World(2, 0)
    return PeerCopies(SimMachine(world, 0, 2, ()), limit)


def test_buffers_are_bounded():
    copies = idle_copies(limit=2**40)
    sent = [(0, 5 * 2**20)] * 2
    leases = [copies.start([], sent, False) for _ in range(PER_SIZE + 1)]
    assert leases[-1] is None
    assert (copies.started, copies.refused, copies.allocated) == (PER_SIZE, 1, PER_SIZE * size_class(10 * 2**20))
    leases[1].release()
    leases[1].release()  # once only
    again = copies.start([], [(0, 3 * 2**20)] * 2, False)  # a smaller one fits in too
    assert again.index == leases[1].index
    leases[1].release()  # what it had is another's now
    assert copies.start([], sent, False) is None
    with pytest.raises(AssertionError, match="read after it went back"):
        leases[1].wait()
    with mock.patch.object(copies.machine, "new_buffer", return_value=False) as asked:
        assert copies.start([], [(0, 2**28)] * 2, False) is None
        assert copies.start([], [(0, 2**28)] * 2, False) is None
    assert asked.call_count == 1
    small = idle_copies(limit=size_class(10 * 2**20))
    assert small.start([], sent, False) is not None
    assert small.start([], sent, True) is None


# --- addresses ------------------------------------------------------------------------------------------------------


class HostDriver:
    """copy_machine.Driver on this process's own memory, one operation at a time; waits are checked at the end."""

    def __init__(self):
        self.waits = []

    def copy(self, stream, to, source, nbytes):
        ctypes.memmove(to, source, nbytes)

    def flags(self, stream, operations, count):
        assert len(operations) == 6 * count  # CUstreamBatchMemOpParams has 48 bytes
        for operation, address, value, flag, *_ in batched(operations, 6):
            assert (operation, flag) in ((1, 1), (2, 0))  # wait until equal; write
            if operation == 2:
                ctypes.c_uint32.from_address(address).value = value
            else:
                self.waits.append((address, value))

    def check(self):
        waits, self.waits = self.waits, []
        assert all(ctypes.c_uint32.from_address(address).value == value for address, value in waits)
        return len(waits)


def batched(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


class HostMachine(copy_machine.CudaMachine):
    """A CudaMachine whose ranks are in one process and share its memory."""

    def __init__(self, rank, memory):
        self.rank, self.size, self._memory = rank, len(memory), memory
        self._words, self._buffers, self._operations = self._shared(0), [], {}
        self._driver = copy_machine.driver()

    def _shared(self, index):
        shared = object.__new__(peer_memory.Shared)
        shared.own = self._memory[self.rank][index]
        shared.addresses = [memory[index].data_ptr() for memory in self._memory]
        return shared

    def current(self):
        return mock.Mock(cuda_stream=0)

    def lane(self, early):
        return mock.Mock(cuda_stream=1)

    def mark(self, buffer, stream):
        pass

    def after(self, stream, buffer):
        pass

    def follow(self, stream, other):
        pass

    def new_buffer(self, nbytes):
        self._buffers.append(self._shared(len(self._buffers) + 1))
        return True


@pytest.mark.parametrize("size", (2, 3))
def test_bytes_and_flags_go_where_they_belong(size, monkeypatch):
    words = 4 * 4 * copy_machine.MOST_BUFFERS * size
    memory = [[torch.zeros(n, dtype=torch.uint8) for n in (words, 2**21, 2**21)] for _ in range(size)]
    driver = HostDriver()
    monkeypatch.setattr(copy_machine, "driver", lambda: driver)
    machines = [HostMachine(rank, memory) for rank in range(size)]
    groups = [Group(None, rank, size) for rank in range(size)]
    pools = {group.rank: PeerCopies(machine, 2**40) for group, machine in zip(groups, machines, strict=True)}
    monkeypatch.setattr(peer_copies, "_copies_for", lambda x, group, sent, choice: pools[group.rank])
    xs = [torch.randn(7, 5) for _ in range(size)]
    xs[-1] = xs[-1]._neg_view()  # which has other bytes in memory
    sizes = [0, 3, 4][-size:] if size == 3 else [6, 1]
    for _ in range(3):  # the second and third time in buffers that were used
        gathers = [peer_copies.start_gather_major(x, group) for x, group in zip(xs, groups, strict=True)]
        rows = [peer_copies.start_exchange_rows(x, sizes, group) for x, group in zip(xs, groups, strict=True)]
        assert driver.check() == size * (size - 1) * 2
        for rank in range(size):
            assert_bitwise_equal(gathers[rank].wait(), torch.stack(xs))
            assert_bitwise_equal(rows[rank].wait(), torch.stack([x.split(sizes)[rank] for x in xs]))
            gathers[rank].release()
            rows[rank].release()
        assert driver.check() == size * (size - 1) * 2
        flat = [peer_copies.start_gather_dim(x, 0, g) for x, g in zip(xs, groups, strict=True)]
        assert driver.check() == size * (size - 1)
        for pending in flat:
            assert_bitwise_equal(pending.wait(), torch.cat(xs))
            pending.release()
        assert driver.check() == size * (size - 1)


# --- who uses lent buffers ------------------------------------------------------------------------------------------


class Lent(Pending):
    """A gather whose memory is overwritten when it is released."""

    leased, open, started = True, 0, 0

    def __init__(self, inner):
        super().__init__(inner.wait().clone(), None)
        self._released = False
        Lent.open += 1
        Lent.started += 1

    def release(self):
        if not self._released:
            self._released = True
            Lent.open -= 1
            self._result.fill_(float("nan"))


LENDING = {
    "start_gather_major": lambda x, group, **_: Lent(start_gather_major(x, group)),
    "start_gather_dim": lambda x, dim, group, **_: Lent(start_gather_dim(x, dim, group)),
    "start_exchange_rows": lambda x, sizes, group, **_: Lent(start_exchange_rows(x, sizes, group)),
}


# for what a CPU has
ON_GPU = mock.patch.object(collectives, "_is_on_gpu", lambda x: True)


def two_steps(tp_group, sp, owner_map, device="cpu", dtype=torch.float32, hidden=48, tokens=24):
    """Two steps of two MLPs of a shared input each: outputs and gradients of all."""
    torch.manual_seed(0)
    options = {"tp_group": tp_group, "sequence_parallel": sp, "owner_map": owner_map, "dtype": dtype, "device": device}
    model = torch.nn.ModuleDict()
    for i in range(2):
        model[f"gate{i}"] = tpi.Linear(hidden, 2 * hidden, parallel_mode="column", **options)
        model[f"up{i}"] = tpi.Linear(hidden, 2 * hidden, parallel_mode="column", **options)
        model[f"down{i}"] = tpi.Linear(2 * hidden, hidden, parallel_mode="row", **options)
    group, results = resolve_group(tp_group), []
    for step in range(2):
        x = wide_randn(tokens, hidden, generator=torch.Generator().manual_seed(step), spread=3).to(device, dtype)
        x = (x.chunk(group.size)[group.rank].clone() if sp else x).requires_grad_()
        y = x
        for i in range(2):
            y = y + model[f"down{i}"](model[f"gate{i}"](y) * model[f"up{i}"](y))
        y.square().mean().backward()
        results += [y.detach().clone(), x.grad.clone()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
    return results + [parameter.detach().clone() for parameter in model.parameters()]


def on_lent(tp_group):
    found = []
    with tpi.set_tp_invariant_mode(True):
        for sp in (False, True):
            for owner_map in ("rows", "cols") if sp else ("rows", "replicate"):
                want = two_steps(tp_group, sp, owner_map)
                Lent.open = Lent.started = 0
                with ON_GPU, mock.patch.multiple(peer_copies, **LENDING):
                    got = two_steps(tp_group, sp, owner_map)
                    most = Lent.open
                    weight_cache.clear()
                found.append((digest(got) == digest(want), bool(torch.stack([t.isnan().any() for t in got]).any())))
                found[-1] += (Lent.started, most, Lent.open)
    return found


def too_early(tp_group):
    with tpi.set_tp_invariant_mode(True), ON_GPU, mock.patch.multiple(peer_copies, **LENDING):
        wait = Lent.wait
        with mock.patch.object(Lent, "wait", lambda self: (wait(self), self.release())[0]):
            return bool(two_steps(tp_group, True, "rows")[0].isnan().any())


def test_nothing_reads_a_buffer_that_was_released():
    for found in run_ranks(on_lent, 3, device="cpu"):
        for same, nans, started, still_open, leaked in found:
            assert same
            assert not nans
            assert started >= 16
            assert still_open <= 2  # what was started ahead, and the last tokens
            assert leaked == 0
    assert all(run_ranks(too_early, 3, device="cpu")), "this test does not see a buffer that is released too early"


def test_cached_gathers_are_not_in_leased_buffers(monkeypatch):
    """Nor is one that was started before `keep` was set, because a CUDA graph may read what is kept."""
    started = []

    def start(weight, layout, peers):
        started.append(Lent(Pending(weight, None)) if peers.lend else Pending(weight, None))
        return started[-1]

    monkeypatch.setattr(gemm_weights, "start_weight", start)
    cache, weight, layout = WeightCache(), torch.ones(3), WeightLayout("whole", 0, Group(None, 0, 1))
    Lent.open = 0
    cache.prefetch(weight, layout)
    assert Lent.open == 1
    cache.keep = 1
    taken = cache.take(weight, layout)
    assert taken is started[0]
    taken.wait()
    taken.release()
    assert Lent.open == 0
    assert cache.take(weight, layout) is started[1]
    assert cache.take(weight, layout) is started[1]


# --- what is chosen -------------------------------------------------------------------------------------------------


def test_the_environment_variable(monkeypatch):
    monkeypatch.delenv("TP_INVARIANT_TRANSPORT", raising=False)
    assert transport() == "auto"
    for choice in peer_memory.TRANSPORTS:
        monkeypatch.setenv("TP_INVARIANT_TRANSPORT", choice)
        assert transport() == choice
        with torch_graph():
            assert transport() == "nccl"
    monkeypatch.setenv("TP_INVARIANT_TRANSPORT", "ce")
    with pytest.raises(
        ValueError, match=r"^TP_INVARIANT_TRANSPORT='ce' is not understood: set it to one of auto, nccl, copy_engine"
    ):
        transport()


def test_the_layer_benchmark_takes_the_library_as_it_comes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["bench_layer.py", "--out", "out"])
    monkeypatch.delenv("TP_INVARIANT_TRANSPORT", raising=False)
    as_it_comes = transport()
    assert importlib.import_module("bench_layer").parse().transport == as_it_comes
    with mock.patch.dict("os.environ"):  # which the contenders change
        with importlib.import_module("bench_layer_contenders").as_contender("stock"):
            pass
        assert transport() == as_it_comes


def chosen(tp_group, monkeypatch_to):
    group = resolve_group(tp_group)
    x = torch.zeros(group.size, 2**20)
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=monkeypatch_to):
        try:
            return peer_copies.start_gather_major(x, group), peer_copies.start_exchange_rows(x, [1] * group.size, group)
        except RuntimeError as error:
            return str(error)


def test_a_cpu_has_no_peer_copies():
    assert peer_memory.why_not(torch.device("cpu")) == "the tensors are on cpu"
    for choice in ("auto", "nccl"):
        assert run_ranks(chosen, 2, choice, device="cpu") == [(None, None)] * 2
    text = (
        "TP_INVARIANT_TRANSPORT=copy_engine, but the 2 ranks of tp_group have no peer copies: the tensors are on cpu "
        "(rank 0). Set it to auto or nccl on all ranks: the bits are the same"
    )
    assert run_ranks(chosen, 2, "copy_engine", device="cpu") == [text] * 2
    assert run_ranks(chosen, 1, "copy_engine", device="cpu") == [(None, None)]


# --- on GPUs --------------------------------------------------------------------------------------------------------


def rounds_of_copies(tp_group):
    """Gathers and exchanges beside NCCL's, several in flight, some ranks late: how many used which transport."""
    group = resolve_group(tp_group)
    late = random.Random(group.rank)  # the ranks' own; all else is shared
    choose = random.Random(0)
    checks, flying = 0, []
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="copy_engine"):
        for n in range(120):
            dtype = choose.choice((torch.uint8, torch.bfloat16, torch.float32))
            generator = torch.Generator("cuda").manual_seed(1000 * n + group.rank)
            rows, cols = choose.choice((1, 7, 64, 513)), choose.choice((1, 3, 1001, 4096))
            x = torch.randint(
                0, 256, (rows, cols * dtype.itemsize), dtype=torch.uint8, device="cuda", generator=generator
            )
            x, early = x.view(dtype), choose.random() < 0.5
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(5_000_000))
            if choose.random() < 0.5:
                want, lent = start_gather_major(x, group).wait(), peer_copies.start_gather_major(x, group, early=early)
            else:
                sizes = [0] * group.size
                for _ in range(rows):
                    sizes[choose.randrange(group.size)] += 1
                want = start_exchange_rows(x, sizes, group).wait()
                lent = peer_copies.start_exchange_rows(x, sizes, group, early=early)
            assert lent is not None
            flying.append((lent, want, x))
            while len(flying) > (choose.randrange(3) if n < 119 else 0):
                lent, want, x = flying.pop(choose.randrange(len(flying)))
                got = lent.wait()
                x.fill_(0)  # its memory is ours again
                if late.random() < 0.3:
                    torch.cuda._sleep(late.randrange(5_000_000))
                same = got.clone()
                lent.release()
                assert_bitwise_equal(same, want)
                checks += 1
        copies = copies_of(group, torch.device("cuda", torch.cuda.current_device()))
    return checks, copies.started, copies.refused, copies.allocated <= copies.limit


@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
def test_bytes_are_those_of_nccl(ranks):
    for checks, started, refused, bounded in run_ranks(rounds_of_copies, ranks, device="cuda"):
        assert checks == 120
        assert started >= 120
        assert refused == 0
        assert bounded


def after_meeting_alone(tp_group):
    """Rank 0 has exchanged in other groups before, so torch numbers its exchanges differently from the others'."""
    group, device = resolve_group(tp_group), torch.device("cuda", torch.cuda.current_device())
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="copy_engine"):
        peer_copies.start_gather_major(torch.ones(8, device=device), group).release()
        for n in range(3 if group.rank == 0 else 0):
            alone = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
            name = f"alone {n} of {id(alone)}"
            torch_private.register_process_group(name, alone)
            own = torch_private.symmetric_memory().empty_strided_p2p((1024,), (1,), torch.uint8, device)
            peer_memory.Shared(own, name)
        x = torch.full((2**25,), group.rank + 1.0, device=device)  # needs a new buffer
        lent = peer_copies.start_gather_major(x, group)
        got = lent.wait()[:, ::4096].clone()
        lent.release()
    return bool((got == torch.arange(1.0, group.size + 1, device=device)[:, None]).all())


@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
def test_ranks_meet_whatever_other_groups_they_have_met_in(ranks):
    assert run_ranks(after_meeting_alone, ranks, device="cuda", timeout=60.0) == [True] * ranks


def without_arrival(tp_group):
    """Rank 1 is late and nobody waits for its bytes: whether rank 0 reads what rank 1 sent."""
    group = resolve_group(tp_group)
    x = torch.full((2**20,), group.rank + 1.0, device="cuda")
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="copy_engine"):
        for _ in range(2 * PER_SIZE):  # whatever the buffers hold
            lent = peer_copies.start_gather_major(x, group)
            lent.wait()
            lent.release()
        machine = copies_of(group, x.device).machine
        flags = machine.flags

        def deaf(stream, buffer, number, *, tell=None, until=None):
            if until != Flag.ARRIVED:
                flags(stream, buffer, number, tell=tell, until=until)

        x += 10.0
        torch.cuda.synchronize()
        group.process_group.barrier().wait()
        if group.rank == 1:
            torch.cuda._sleep(500_000_000)
        with mock.patch.object(machine, "flags", deaf):
            lent = peer_copies.start_gather_major(x, group)
            seen = lent.wait()[1].clone()
        machine.flags(machine.current(), lent._lease.index, lent._lease._buffer.number, until=Flag.ARRIVED)
        arrived = lent.wait()[1].clone()
        lent.release()
    return bool((seen == 12.0).all()), bool((arrived == 12.0).all())


@pytest.mark.parametrize("ranks", on_gpus(2))
def test_without_the_wait_the_bytes_are_wrong(ranks):
    assert run_ranks(without_arrival, ranks, device="cuda")[0] == (False, True)


def by_transport(tp_group, sp):
    """Digests of two steps by each transport, and how many blocks used a copy engine."""
    group, found = resolve_group(tp_group), []
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = {"device": "cuda", "dtype": torch.bfloat16, "hidden": 1536, "tokens": 1536}
    with tpi.set_tp_invariant_mode(True):
        for choice in ("nccl", "copy_engine", "auto"):
            before = 0 if choice == "nccl" else copies_of(group, device).started
            least = mock.patch.object(peer_copies, "MIN_BYTES", 2**20)  # of blocks this small
            with least, mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=choice):
                results = [two_steps(tp_group, sp, owner_map, **sizes) for owner_map in ("rows", "cols", "replicate")]
            after = 0 if choice == "nccl" else copies_of(group, device).started
            found.append((digest(results), after - before))
    return found


@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
@pytest.mark.parametrize("sp", (False, True))
def test_layers_have_the_same_bits_by_either_transport(ranks, sp):
    for (nccl, _), (copied, started), (auto, large) in run_ranks(by_transport, ranks, sp, device="cuda"):
        assert nccl == copied == auto
        assert started > 40
        assert 0 < large <= started
