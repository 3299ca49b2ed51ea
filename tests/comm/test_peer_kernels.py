"""Moves by kernels that reach peers' memory: when they are used, the order of streams, and on GPUs their bytes."""

import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpus import on_gpus

import tp_invariant as tpi
from tp_invariant.comm import collectives, moves, peer_copies, peer_kernels, peer_memory
from tp_invariant.comm.collectives import NOT_LENT, Group, Peers, Pending, gather_dim, resolve_group
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.testing import assert_bitwise_equal, gpu_ranks, run_ranks, wide_randn

GPUS = gpu_ranks()


# --- the order of streams -------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)


def test_moves_of_a_process_come_one_after_another(monkeypatch):
    channel = object.__new__(peer_kernels.Channel)
    channel.moves, channel.stream, channel._handle, channel._device = 0, None, -1, None
    a, b = Stream("a"), Stream("b")
    captured = {a: False, b: False}
    monkeypatch.setattr(peer_kernels, "is_captured", captured.__getitem__)

    def moved_on(stream):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        return channel.next(ord(stream.name))

    assert [moved_on(stream) for stream in (a, a, b)] == [1, 2, 3]
    captured[a] = True  # it waits for nothing of a capture that is over
    assert moved_on(a) == 4
    captured[b] = True
    assert moved_on(b) == 5
    assert (a.waited, b.waited) == ([], ["a", "a"])


# --- when they are used ---------------------------------------------------------------------------------------------


def asked(tp_group, choice):
    group, x = resolve_group(tp_group), torch.ones(4, 8)
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=choice):
        return [
            peer_kernels.start_gather_major(x, group),
            peer_kernels.start_gather_dim(x, 1, group),
            peer_kernels.start_exchange_rows(x, [2, 2], group),
            peer_kernels.start_exchange_cols_for_rows(x, [2, 2], [8, 8], group),
        ]


@pytest.mark.parametrize("choice", ("auto", "nccl", "copy_engine"))
def test_a_cpu_has_none(choice):
    assert run_ranks(asked, 2, choice, device="cpu") == [[None] * 4] * 2


class OnGpu(torch.Tensor):
    """A tensor of a CPU that says it is on a GPU."""

    is_cuda = True


class Noting:
    """In place of what launches kernels: what they would read of memory."""

    def __init__(self):
        self.read = []

    def move(self, x, *options):
        self.read.append(x)


def test_kernels_get_what_torch_negates_or_conjugates_by_a_flag_alone(monkeypatch):
    """They read memory, and know nothing of flags."""
    found, group = Noting(), Group(None, 0, 2)
    monkeypatch.setattr(peer_kernels, "kernels_of", lambda *_: found)
    plain = torch.complex(torch.arange(16.0), torch.ones(16))
    for x in (plain.conj(), plain.real._neg_view(), plain.conj().imag):
        peer_kernels.start_gather_major(x.as_subclass(OnGpu), group)
        read = found.read.pop().as_subclass(torch.Tensor)
        assert not read.is_conj() and not read.is_neg()
        assert_bitwise_equal(read, x.resolve_conj().resolve_neg().contiguous())


class Emulated(Pending):
    """What a kernel would bring, by gloo."""

    def __init__(self, result):
        super().__init__(result, None)


class Emulation:
    """peer_kernels' functions by gloo on a CPU, which write down what they are asked for."""

    def __init__(self):
        self.asked = []

    def __enter__(self):
        def start(name):
            real = getattr(collectives, name, None) or getattr(collectives, name.replace("start_", ""))

            def made(x, *options, **_):
                self.asked.append(name.replace("start_", ""))
                result = real(x, *options)
                return Emulated(result.wait() if isinstance(result, Pending) else result)

            return made

        names = "start_gather_major", "start_gather_dim", "start_exchange_rows", "start_exchange_cols_for_rows"
        self._patches = [mock.patch.object(peer_kernels, name, start(name)) for name in names]
        self._patches.append(mock.patch.object(collectives, "_is_on_gpu", lambda x: True))
        for patch in self._patches:
            patch.start()
        return self.asked

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()


def training(tp_group, sp, owner_map):
    """Outputs and gradients of two linear layers with the emulation and without, and what it was asked for."""
    group = resolve_group(tp_group)
    options = dict(tp_group=tp_group, sequence_parallel=sp, owner_map=owner_map)
    generator = torch.Generator().manual_seed(1)
    x, dy = (wide_randn(8, 48, generator=generator) for _ in range(2))
    if sp:
        x, dy = (t.chunk(group.size)[group.rank] for t in (x, dy))

    def step():
        weight_cache.clear()
        torch.manual_seed(0)
        layers = [
            tpi.Linear(48, 64, parallel_mode="column", **options), tpi.Linear(64, 48, parallel_mode="row", **options)
        ]  # fmt: skip
        given = x.clone().requires_grad_()
        y = layers[1](F.silu(layers[0](given)))
        y.backward(dy)
        return [y.detach(), given.grad, *(p.grad for layer in layers for p in layer.parameters())]

    with tpi.set_tp_invariant_mode(True):
        want = step()
        with Emulation() as asked:
            got = step()
    return want, got, asked


# The tokens of x, then for a row-parallel product its operands (by columns also its result); in backward the tokens of
# dy (those of x are still there) and the operands of the column-parallel layer's dx.
MOVES = {
    (True, "rows"): ["gather_dim", "exchange_rows", "gather_major"] * 2,
    (True, "cols"): ["gather_dim", "gather_major", "exchange_rows", "exchange_cols_for_rows"] * 2,
    (False, "rows"): ["exchange_rows", "gather_major", "gather_dim"] * 2,
    (False, "cols"): ["gather_major", "exchange_rows", "gather_dim"] * 2,
}


@pytest.mark.parametrize(("sp", "owner_map"), MOVES)
def test_layers_use_them_for_what_they_wait_for(sp, owner_map):
    for want, got, asked in run_ranks(training, 2, sp, owner_map, device="cpu"):
        assert_bitwise_equal(got, want)
        assert asked == MOVES[sp, owner_map]


class Way:
    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **options):
        self.taken.append(self.name)
        return None


def test_what_is_overlapped_asks_for_a_copy_engine_first(monkeypatch):
    taken, group, x = [], Group(None, 0, 1), torch.ones(2, 8)
    monkeypatch.setattr(Way, "taken", taken, raising=False)
    for function in ("start_gather_dim", "start_exchange_rows", "start_gather_major"):
        monkeypatch.setattr(peer_kernels, function, Way("kernel"))
    for function in ("start_gather_dim", "start_exchange_rows", "start_gather_major"):
        monkeypatch.setattr(peer_copies, function, Way("copy"))
    for start in (
        lambda peers: moves.start_gather_dim(x, 0, group, peers),
        lambda peers: moves.start_gather_major(x, group, peers),
        lambda peers: moves.start_exchange_rows(x, [2], group, peers),
    ):
        for peers, order in (
            (Peers(), ["kernel", "copy"]),
            (Peers(overlapped=True), ["copy", "kernel"]),
            (Peers(early=True), ["copy", "kernel"]),
            (NOT_LENT, ["kernel"]),
        ):
            taken.clear()
            start(peers)
            assert taken == order


# --- on GPUs --------------------------------------------------------------------------------------------------------


def data(n, rank, shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1000 * n + rank)
    raw = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, raw, dtype=torch.uint8, device="cuda", generator=generator).view(dtype)


def start(kind, x, group, by=peer_kernels):
    size, rows = group.size, x.shape[0]
    if kind == "exchange_rows":
        return by.start_exchange_rows(x, [rows // size] * size, group)
    if kind == "cols_for_rows":
        sizes = [rows // size] * size, [x.shape[1]] * size
        if by is collectives:
            return Pending(collectives.exchange_cols_for_rows(x, *sizes, group), None)
        return by.start_exchange_cols_for_rows(x, *sizes, group)
    return by.start_gather_major(x, group) if kind == "major" else by.start_gather_dim(x, int(kind), group)


KINDS = ("major", "0", "1", "exchange_rows", "cols_for_rows")


def rounds(tp_group):
    """Moves of all kinds beside NCCL's, on two streams, some ranks late: how many, and how many were refused."""
    group = resolve_group(tp_group)
    late, choose = random.Random(group.rank), random.Random(0)
    streams, done, none = [torch.cuda.current_stream(), torch.cuda.Stream()], 0, 0
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="auto"):
        for n in range(300):
            dtype, kind = choose.choice((torch.uint8, torch.bfloat16, torch.float32)), choose.choice(KINDS)
            rows, cols = choose.choice(((1, 16), (7, 130), (64, 1024), (85, 3072), (512, 4096), (300, 1001)))
            x = data(n, group.rank, (rows * group.size, cols), dtype)
            stream, want = choose.choice(streams), start(kind, x, group, collectives).wait()
            torch.cuda.synchronize()
            if late.random() < 0.2:
                torch.cuda._sleep(late.randrange(3_000_000))
            with torch.cuda.stream(stream):
                pending = start(kind, x, group)
                if pending is None:
                    none += 1
                    continue
            got = pending.wait()
            x.fill_(0)
            assert_bitwise_equal(got, want)
            done += 1
    return done, none


@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
def test_bytes_are_those_of_nccl(ranks):
    for done, none in run_ranks(rounds, ranks, device="cuda"):
        assert done > 180
        assert none > 5  # rows of 1001 bytes, and what is too large


def in_a_graph(tp_group):
    """Replays with new values each time, late ranks, two streams within the graph, eager moves between."""
    group = resolve_group(tp_group)
    late = random.Random(group.rank)
    x = torch.zeros(64 * group.size, 512, device="cuda", dtype=torch.bfloat16)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="auto"):
        start("0", x, group).wait()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            one = start("exchange_rows", x, group).wait()
            with torch.cuda.stream(side):
                two = start("1", x, group).wait()
            three = start("0", one.flatten(0, 1) + 1, group).wait()
            torch.cuda.current_stream().wait_stream(side)
        for n in range(100):
            x.copy_(data(n, group.rank, x.shape, torch.uint8).to(x.dtype))
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(3_000_000))
            graph.replay()
            eager = start("cols_for_rows", x, group).wait()
            want = start("exchange_rows", x, group, collectives).wait()
            assert_bitwise_equal(one, want)
            assert_bitwise_equal(two, gather_dim(x, 1, group))
            assert_bitwise_equal(three, gather_dim(want.flatten(0, 1) + 1, 0, group))
            assert_bitwise_equal(eager, start("cols_for_rows", x, group, collectives).wait())
    return True


@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
def test_a_cuda_graph_replays_them(ranks):
    assert run_ranks(in_a_graph, ranks, device="cuda") == [True] * ranks


def mlp(tp_group, tokens, hidden, inner, owner_map, choice):
    """Output and gradients of a sequence-parallel MLP: those of this rank, and how many moves there were."""
    group = resolve_group(tp_group)
    options = dict(
        tp_group=tp_group, sequence_parallel=group.size > 1, owner_map=owner_map, device="cuda", dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(1)
    x, dy = (wide_randn(tokens, hidden, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
    x, dy = (t.chunk(group.size)[group.rank].clone() for t in (x, dy))
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=choice), tpi.set_tp_invariant_mode(True):
        torch.manual_seed(0)
        column = tpi.Linear(hidden, inner, parallel_mode="column", bias=False, **options)
        row = tpi.Linear(inner, hidden, parallel_mode="row", bias=False, **options)
        before = 0
        if choice == "auto" and group.size > 1:
            before = peer_kernels.kernels_of(group, x.device).moves
        given = x.requires_grad_()
        y = row(F.silu(column(given)))
        y.backward(dy)
        torch.cuda.synchronize()
        weight_cache.clear()
        used = peer_kernels.kernels_of(group, x.device).moves - before if choice == "auto" and group.size > 1 else 0
    results = [y.detach(), given.grad, column.weight.grad, row.weight.grad]
    if group.size > 1:
        results = [gather_dim(t.contiguous(), dim, group) for t, dim in zip(results, (0, 0, 0, 1), strict=True)]
    return [t.cpu() for t in results], used


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    ((768, 1536, 4608), (2040, 1008, 2304), (24, 1536, 4608)),
    ids=("large", "odd", "small"),
)
@pytest.mark.parametrize("owner_map", ("rows", "cols"))
@pytest.mark.parametrize("ranks", on_gpus(2, 3, 4, 8))
def test_layers_have_the_same_bits(ranks, owner_map, tokens, hidden, inner):
    ((want, _),) = run_ranks(mlp, 1, tokens, hidden, inner, owner_map, "nccl", device="cuda")
    for choice in ("nccl", "auto"):
        for got, used in run_ranks(mlp, ranks, tokens, hidden, inner, owner_map, choice, device="cuda"):
            assert_bitwise_equal(got, want)
            assert (used > 3) == (choice == "auto")


def alone(tp_group):
    group, x = resolve_group(tp_group), torch.ones(1, 64, device="cuda")
    environment = mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="auto")
    with environment, mock.patch.object(peer_memory, "MOST_LOOKS", 1_000_000):
        peer_kernels.start_gather_major(x, group).wait()
        torch.cuda.synchronize()
        if group.rank == 0:
            peer_kernels.start_gather_major(x, group).wait()
            torch.cuda.synchronize()


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import pytest, test_peer_kernels
from tp_invariant.testing import RankError, run_ranks
if __name__ == "__main__":
    with pytest.raises(RankError) as caught:
        run_ranks(test_peer_kernels.alone, 2, device="cuda")
    print(caught.value)
"""


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_rank_that_does_not_arrive_ends_the_wait(tmp_path):
    """In processes of their own, because a failed assertion ends a CUDA context."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=500)
    assert "a rank has not come to a collective" in done.stdout + done.stderr
    assert "rank 0" in done.stdout
