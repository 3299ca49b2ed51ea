"""Small gathers through peers' memory: when they are used, the order of streams, and on GPUs their bytes."""

import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import tp_invariant as tpi
from tp_invariant.comm import small_gathers
from tp_invariant.comm.collectives import gather_dim, gather_major, resolve_group
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.testing import assert_bitwise_equal, gpu_ranks, run_ranks, wide_randn

GPUS = gpu_ranks()
SHARED = torch.cuda.device_count() < GPUS
ON_GPUS = [
    pytest.param(n, marks=[pytest.mark.gpu, pytest.mark.skipif(n > GPUS, reason=f"needs {n} GPUs")]) for n in (2, 3, 4)
]


# --- the order of streams -------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)


def test_gathers_of_a_process_come_one_after_another():
    channel = object.__new__(small_gathers.Channel)
    channel.gathers, channel._last = 0, None
    a, b = Stream("a"), Stream("b")
    numbers = [channel.next(*call) for call in ((a, None), (a, None), (b, None), (a, 7), (b, 7), (b, 8), (b, 8))]
    assert numbers == [1, 2, 3, 4, 5, 6, 7]
    # what one capture holds never waits for another's, nor for what runs now
    assert (a.waited, b.waited) == ([], ["a", "a"])


# --- when they are used ---------------------------------------------------------------------------------------------


def asked(tp_group, choice):
    group, x = resolve_group(tp_group), torch.ones(2, 8)
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=choice):
        return small_gathers.start_gather(x, group), small_gathers.start_gather(x, group, dim=1)


@pytest.mark.parametrize("choice", ("auto", "nccl", "copy_engine"))
def test_a_cpu_has_no_small_gathers(choice):
    assert run_ranks(asked, 2, choice, device="cpu") == [(None, None)] * 2


def through_owners(tp_group, owner_map, rows):
    """Row-parallel forward with small gathers (emulated with gloo) and without: both results, and their number."""
    group, calls = resolve_group(tp_group), []

    def start(x, group, dim=0, shape=None):
        calls.append(dim)
        gathered = gather_dim(x, 1, group) if dim else gather_major(x, group)
        return mock.Mock(wait=lambda: gathered if shape is None else gathered.view(shape), leased=False)

    torch.manual_seed(0)
    layer = tpi.Linear(48, 32, parallel_mode="row", tp_group=tp_group, owner_map=owner_map)
    x = wide_randn(rows, 48, generator=torch.Generator().manual_seed(1)).chunk(group.size, 1)[group.rank]
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        want = layer(x)
        with mock.patch.object(small_gathers, "start_gather", start):
            got = layer(x)
    return want, got, calls


@pytest.mark.parametrize(("owner_map", "rows", "dims"), (("cols", 3, [0, 1]), ("rows", 4, [0, 0]), ("rows", 3, [0])))
def test_layers_use_them(owner_map, rows, dims):
    """For both operands' gathers and the result's; uneven rows use another transport."""
    for want, got, calls in run_ranks(through_owners, 2, owner_map, rows, device="cpu"):
        assert_bitwise_equal(got, want)
        assert calls == dims


# --- on GPUs --------------------------------------------------------------------------------------------------------


def data(n, rank, shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1000 * n + rank)
    raw = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, raw, dtype=torch.uint8, device="cuda", generator=generator).view(dtype)


def rounds(tp_group):
    """Gathers of all kinds beside NCCL's, on two streams, some ranks late: how many, and how many were refused."""
    group = resolve_group(tp_group)
    late, choose = random.Random(group.rank), random.Random(0)
    streams, done, none = [torch.cuda.current_stream(), torch.cuda.Stream()], 0, 0
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="auto"):
        for n in range(300):
            dtype = choose.choice((torch.uint8, torch.bfloat16, torch.float32))
            shape = choose.choice(
                ((1, 2), (1, 4096), (7, 130), (64, 1024), (64, 3072), (300, 3072), (513, 100), (3, 1001))
            )
            x, dim, stream = data(n, group.rank, shape, dtype), choose.randrange(2), choose.choice(streams)
            want = gather_dim(x, 1, group) if dim else gather_major(x, group)
            torch.cuda.synchronize()
            if late.random() < 0.2:
                torch.cuda._sleep(late.randrange(3_000_000))
            with torch.cuda.stream(stream):
                pending = small_gathers.start_gather(x, group, dim)
                if pending is None:
                    none += 1
                    continue
            got = pending.wait()
            x.fill_(0)
            assert_bitwise_equal(got, want)
            done += 1
    return done, none


@pytest.mark.parametrize("ranks", ON_GPUS)
def test_bytes_are_those_of_nccl(ranks):
    for done, none in run_ranks(rounds, ranks, device="cuda"):
        assert done > 180
        assert none > 5  # a row of 1001 bytes is no number of words, 300 of 12 KiB are too many


def in_a_graph(tp_group):
    """Replays with new values each time, late ranks, two streams within the graph, eager gathers between."""
    group = resolve_group(tp_group)
    late = random.Random(group.rank)
    x, y = torch.zeros(8, 512, device="cuda", dtype=torch.bfloat16), torch.zeros(1, 6, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="auto"):
        small_gathers.start_gather(x, group).wait()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            one = small_gathers.start_gather(x, group, 1).wait()
            with torch.cuda.stream(side):
                two = small_gathers.start_gather(y, group).wait()
            three = small_gathers.start_gather(one + one, group).wait()
            torch.cuda.current_stream().wait_stream(side)
        for n in range(100):
            x.copy_(data(n, group.rank, x.shape, torch.uint8).to(x.dtype))
            y.copy_(data(n, group.rank, y.shape, torch.uint8).float())
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(3_000_000))
            graph.replay()
            eager = small_gathers.start_gather(y, group).wait()
            want = gather_dim(x, 1, group)
            assert_bitwise_equal(one, want)
            assert_bitwise_equal(two, gather_major(y, group))
            assert_bitwise_equal(eager, two)
            assert_bitwise_equal(three, gather_major(want + want, group))
    return True


@pytest.mark.parametrize("ranks", ON_GPUS)
def test_a_cuda_graph_replays_them(ranks):
    assert run_ranks(in_a_graph, ranks, device="cuda") == [True] * ranks


def layer(tp_group, rows, choice):
    """A row-parallel layer's outputs, eager and captured, and the number of small gathers."""
    group = resolve_group(tp_group)
    torch.manual_seed(0)
    made = tpi.Linear(
        4608, 1536, parallel_mode="row", tp_group=tp_group, owner_map="cols", device="cuda", dtype=torch.bfloat16
    )
    x = wide_randn(rows, 4608, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    x, graph = x.chunk(group.size, 1)[group.rank].contiguous(), torch.cuda.CUDAGraph()
    before = 0
    with (
        mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=choice),
        mock.patch.object(weight_cache, "keep", 1),  # so that activations alone travel in the graph
        tpi.set_tp_invariant_mode(True),
        torch.no_grad(),
    ):
        if choice == "auto" and group.size > 1:
            channels = small_gathers.gathers_of(group, x.device)
            before = channels.eager.gathers + channels.captured.gathers
        eager = made(x)
        made(x)
        if choice == "nccl" and SHARED:  # gloo, then, which no graph holds
            return [eager.cpu(), eager.cpu()], 0
        with torch.cuda.graph(graph):
            captured = made(x)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        weight_cache.clear()
    count = 0
    if choice == "auto" and group.size > 1:
        count = channels.eager.gathers + channels.captured.gathers - before
    return [eager.cpu(), captured.cpu()], count


@pytest.mark.parametrize("rows", (1, 5, 64))
@pytest.mark.parametrize("ranks", ON_GPUS)
def test_layers_have_the_same_bits(ranks, rows):
    (((want, captured), _),) = run_ranks(layer, 1, rows, "nccl", device="cuda")
    assert_bitwise_equal(captured, want)
    for choice, gathers in (("nccl", 0), ("auto", 6)):
        for got, count in run_ranks(layer, ranks, rows, choice, device="cuda"):
            assert_bitwise_equal(got, [want, want])
            assert count == gathers


def alone(tp_group):
    group, x = resolve_group(tp_group), torch.ones(1, 64, device="cuda")
    with mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT="auto"):
        gathers = small_gathers.gathers_of(group, x.device)
        gathers._looks = 1_000_000
        small_gathers.start_gather(x, group).wait()
        torch.cuda.synchronize()
        if group.rank == 0:
            small_gathers.start_gather(x, group).wait()
            torch.cuda.synchronize()


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import pytest, test_small_gathers
from tp_invariant.testing import RankError, run_ranks
if __name__ == "__main__":
    with pytest.raises(RankError) as caught:
        run_ranks(test_small_gathers.alone, 2, device="cuda")
    print(caught.value)
"""


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_a_rank_that_does_not_arrive_ends_the_wait(tmp_path):
    """In processes of their own, because a failed assertion ends a CUDA context."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=500)
    assert "a rank has not come to a gather" in done.stdout + done.stderr
    assert "rank 0" in done.stdout
