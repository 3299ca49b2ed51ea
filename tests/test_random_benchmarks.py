"""The benchmarks on drawn shapes: what is drawn, their statistics and report, and that wrong kernels fail.

The passes run on a CPU, Triton's in its interpreter, with a clock that counts calls in place of the GPU's.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib
import json
import math
import re
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PARTS = ("random_gemm", "random_attention", "random_norm")


@pytest.fixture
def modules(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = (*PARTS, "random_shapes", "gpu_timing", "bench_gemm", "bench_attention", "bench_norm")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def on_cpu(modules, monkeypatch) -> SimpleNamespace:
    """The passes run on the CPU, once each; ours takes 2 us and every other 1."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU the benchmarks themselves show it")

    def fake(runs, seconds):
        for run in runs.values():
            run()
        return {name: 2.0 if name == "ours" else 1.0 for name in runs}

    for part in PARTS:
        monkeypatch.setattr(getattr(modules, part), "in_turn", fake)
    monkeypatch.setattr(modules.random_attention, "gpu_microseconds", lambda run, calls: [1.0] * calls)
    math_backend = modules.bench_attention.sdpa(torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(
        modules.random_attention,
        "backends",
        lambda shape, q, k, v, grad: {
            "math": math_backend(q, k, v, True, grad, modules.random_attention.whole_mask(shape))
        },
    )
    return modules


# --- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_seed_names_its_shapes(modules, part):
    draw = getattr(modules, part).draw
    assert draw(3, 40) == draw(3, 60)[:40] != draw(4, 40)
    assert len({str(shape) for shape in draw(3, 40)}) > 35


def logarithms_are_uniform(sizes: list[int], low: int, high: int) -> bool:
    """A quarter of them in each quarter of the logarithms, give or take 5%."""
    quarters = collections.Counter(min(3, int(4 * math.log(size / low) / math.log(high / low))) for size in sizes)
    return (
        min(sizes) >= low and max(sizes) <= high and all(abs(quarters[i] / len(sizes) - 0.25) < 0.05 for i in range(4))
    )


@pytest.mark.parametrize("few_rows", (False, True))
def test_ranges_of_products(modules, few_rows):
    gemm = modules.random_gemm
    shapes = gemm.draw(0, 4000, few_rows)
    assert {shape.layout for shape in shapes} == ({"fwd", "dgrad"} if few_rows else {"fwd", "dgrad", "wgrad"})
    assert {shape.dtype for shape in shapes} == {"bfloat16", "float16"}
    assert logarithms_are_uniform([shape.n for shape in shapes], 64, 32768)
    assert logarithms_are_uniform([shape.k for shape in shapes], 64, 32768)
    rows = [shape.m for shape in shapes if shape.layout != "wgrad"]
    assert logarithms_are_uniform(rows, 1, 256) if few_rows else logarithms_are_uniform(rows, 256, 32768)
    for name, sizes in (("n", [s.n for s in shapes]), ("k", [s.k for s in shapes])):
        share = sum(size % 8 == 0 for size in sizes) / len(sizes)
        assert abs(share - (0.9 + 0.1 / 8)) < 0.02, name
    assert not logarithms_are_uniform(list(range(64, 32768, 8)), 64, 32768)  # the control: uniform themselves


def test_ranges_of_attention(modules):
    shapes = modules.random_attention.draw(0, 3000)
    assert {s.head_dim for s in shapes} == {64, 96, 128, 256}
    assert {s.mask for s in shapes} == {"causal", "full", "window"}
    assert {s.heads // s.kv_heads for s in shapes} == {1, 2, 4, 8, 16, 32} and all(s.kv_heads >= 1 for s in shapes)
    assert logarithms_are_uniform([s.tokens for s in shapes], 512, 32768)
    assert all((s.window is not None) == (s.mask == "window") for s in shapes)
    assert all(s.window <= s.tokens for s in shapes if s.window)
    assert max(s.batch * s.tokens * s.heads * s.head_dim for s in shapes) <= 2**28
    with_matrix = [s for s in shapes if s.matrix]
    assert abs(len(with_matrix) / sum(s.window is None and s.tokens <= 2**14 for s in shapes) - 0.5) < 0.05
    assert {s.matrix for s in with_matrix} == {"bool", "bias"} and not any(s.window for s in with_matrix)
    sizes = {(s.of_batch, s.of_heads): s.batch**s.of_batch * s.heads**s.of_heads * s.tokens**2 for s in with_matrix}
    assert len(sizes) == 4 and max(sizes.values()) <= 2**28


def test_attentions_of_each_kind_are_compiled_first(modules):
    attention = modules.random_attention
    found = attention.jobs(attention.draw(0, 200))
    kinds = [(shape.head_dim, shape.mask, shape.matrix) for shape in found]
    assert len(set(kinds[:28])) == 28 and len(found) > 150
    assert set(found) == {attention.like(shape) for shape in attention.draw(0, 200)}


def test_ranges_of_norms(modules):
    shapes = modules.random_norm.draw(0, 3000)
    assert logarithms_are_uniform([s.hidden for s in shapes], 128, 16384)
    assert {s.rms for s in shapes} == {True, False} and {s.dtype for s in shapes} == {"bfloat16", "float16"}
    assert all(64 <= s.rows <= 65536 and s.rows * s.hidden <= 2**27 for s in shapes)


def test_a_reduced_size_compiles_alike(modules):
    for size in (1, 7, 16, 1023, 1024, 4096, 32767, 32768, 24575):
        small = modules.random_shapes.reduced(size)
        assert small <= 1023 and (small == 1) == (size == 1)
        assert all((small % d == 0) == (size % d == 0) for d in (8, 16, 64, 128, 256, 512) if size >= 1024)


# --- statistics, order, report ----------------------------------------------------------------------------------------


def test_statistics(modules):
    found = modules.random_shapes.statistics_of([4.0, 1.0, *[2.0] * 19])
    assert found["geometric mean"] == pytest.approx(2.0) and found["least"] == 1.0
    assert found["5th percentile"] == 2.0  # the second of 21
    assert modules.random_shapes.statistics_of([1.0, 2.0])["5th percentile"] == pytest.approx(1.05)
    assert list(modules.random_shapes.statistics_of([3.0]).values()) == pytest.approx([3.0] * 3)


def row(us: float, contender_us: float = 10.0) -> list[dict]:
    return [{"case": "fwd", "contender": "cublas", "contender_us": contender_us, "us": us}]


def test_a_run_ends_at_its_limit(modules):
    now = iter(range(100))
    rows = modules.random_shapes.run("abcdef", lambda shape: row(5.0), seconds=3, start=0, clock=lambda: next(now))
    assert [r["shape"] for r in rows] == ["a", "b", "c"]  # asked at 0, 1, 2, and 3


def test_the_report(modules, tmp_path, capsys):
    shapes = modules.random_shapes

    def measure(number):
        if number == 3:
            raise shapes.WrongResult("12 bytes differ")
        if number == 4:
            raise torch.OutOfMemoryError("no")
        return row(us=float(number + 1))

    rows = shapes.run(range(20), measure, seconds=math.inf, start=0)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 20 and "WRONG: 12 bytes differ" in printed[3] and "out of memory" in printed[4]
    file = tmp_path / "results" / "out.json"
    assert shapes.report(rows, asked=25, seed=7, unit="cuBLAS's", file=file) == 1
    text = capsys.readouterr().out
    assert "18 of 25 shapes measured, 1 wrong, 1 skipped" in text and "5 not reached in time" in text
    assert "seed 7" in text and torch.__version__ in text and "least 0.500" in text
    worst = text.split("the worst first:\n")[1].splitlines()
    assert len(worst) == 11 and "WRONG" in worst[0]
    assert [float(line.split()[-1]) for line in worst[1:]] == [round(10 / us, 3) for us in range(20, 10, -1)]
    written = json.loads(file.read_text())
    assert written["seed"] == 7 and written["measured"] == 18 and len(written["rows"]) == 20
    assert written["speed"]["fwd"]["count"] == 18 and written["speed"]["fwd"]["least"] == 0.5
    right = [r for r in rows if "speed" in r]
    assert shapes.report(right, asked=18, seed=7, unit="cuBLAS's", file=None) == 0
    assert shapes.report([], asked=18, seed=7, unit="cuBLAS's", file=None) == 1  # nothing was measured


def test_turns_are_forwards_and_backwards(modules):
    """And the cost of a shape is bounded: a slow one is called few times, a fast one 20 times a turn at most."""
    order = []

    def clocked(run, calls):
        order.append((run(), calls))
        return [{"slow": 9e4, "fast": 10.0}[order[-1][0]]] * calls

    runs = {"slow": lambda: "slow", "fast": lambda: "fast"}
    assert modules.gpu_timing.in_turn(runs, 0.3, clocked) == {"slow": 9e4, "fast": 10.0}
    assert order[:2] == [("slow", 2), ("fast", 2)]  # the estimate
    turn, back = [("slow", 1), ("fast", 20)], [("fast", 20), ("slow", 1)]
    assert order[2:] == [*turn, *back, *turn, *back]


@pytest.mark.parametrize("script", ("gemm", "attention", "norm"))
def test_options(modules, script, monkeypatch, capsys):
    module: ModuleType = getattr(modules, f"bench_{script}")
    for arguments, message in (([], "--out or --random is needed"), (["--random", "0"], "are at least 1")):
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        with pytest.raises(SystemExit):
            module.main()
        assert message in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["bench", "--help"])
    with pytest.raises(SystemExit):
        module.main()
    assert "log-uniform" in capsys.readouterr().out.replace("log-\n", "log-")


# --- what is measured is checked --------------------------------------------------------------------------------------


def test_a_product_is_measured_and_checked(on_cpu, monkeypatch):
    gemm = on_cpu.random_gemm
    shape = gemm.Shape("dgrad", "bfloat16", 70, 66, 129)
    measure = lambda: gemm.measure(shape, seed=0, seconds=1, few_rows=False)  # noqa: E731
    assert measure() == [{"case": "dgrad", "contender": "cublas", "contender_us": 1.0, "us": 2.0}]
    right = gemm.matmul

    def misses_the_last_k(a, b, **options):
        return right(a, b, **options) if options else right(a[:, :-1], b[:-1])

    def other_bits(a, b, **options):
        c = right(a, b, **options)
        if not options:
            c[0, 0] = torch.nextafter(c[0, 0], c[0, 0] + 1)
        return c

    for wrong, message in ((misses_the_last_k, "error"), (other_bits, "bytes differ")):
        monkeypatch.setattr(gemm, "matmul", wrong)
        with pytest.raises(on_cpu.random_shapes.WrongResult, match=message):
            measure()


def test_few_rows_are_timed_in_a_graph(on_cpu, monkeypatch):
    """Three products with an operand of their own each: a product's time is a third of the graph's."""
    gemm, of = on_cpu.random_gemm, []

    def in_graph(runs):
        of.append(len(runs))
        return lambda: [run() for run in runs]

    monkeypatch.setattr(gemm, "in_graph", in_graph)
    monkeypatch.setattr(gemm, "_IN_A_GRAPH", (2, 3))
    (found,) = gemm.measure(gemm.Shape("fwd", "float16", 3, 65, 72), seed=0, seconds=1, few_rows=True)
    assert of == [3, 3] and found["us"] == 2 / 3 and found["contender_us"] == 1 / 3


@pytest.mark.parametrize("rms", (True, False))
def test_a_norm_is_measured_and_checked(on_cpu, rms, monkeypatch):
    norm = on_cpu.random_norm
    shape = norm.Shape(rms, "bfloat16", 33, 24)
    rows = norm.measure(shape, seed=0, seconds=1)
    assert [(r["case"], r["us"]) for r in rows] == [("forward", 2.0), ("backward", 2.0)]
    case = norm.Operands(shape)
    right = norm.fold_weight_gradients
    monkeypatch.setattr(norm, "fold_weight_gradients", lambda sums, *dtypes: right(sums[:-1], *dtypes))
    with pytest.raises(on_cpu.random_shapes.WrongResult, match="dgamma: error"):
        norm.check(case)
    monkeypatch.setattr(norm, "fold_weight_gradients", right)
    forward = norm.norm_forward

    def by_the_number_of_rows(x, *args, **options):
        y, *others = forward(x, *args, **options)
        return (y * (1 if len(x) == 33 else 1 + 2**-6), *others)

    monkeypatch.setattr(norm, "norm_forward", by_the_number_of_rows)
    with pytest.raises(on_cpu.random_shapes.WrongResult, match="y of some rows alone and with others"):
        norm.check(case)


@pytest.mark.parametrize(
    "mask, others",
    (
        ("causal", ()),
        ("full", ()),
        ("window", (20,)),
        ("causal", (None, "bool", False, True)),
        ("full", (None, "bias", True, True)),
    ),
)
def test_attention_is_measured_and_checked(on_cpu, mask, others, monkeypatch):
    attention = on_cpu.random_attention
    shape = attention.Shape(2, 4, 2, 65, 32, mask, *others)
    rows = attention.measure(shape, seed=0, seconds=1)
    assert [(r["case"], r["contender"], r["us"]) for r in rows] == [("forward", "math", 2.0), ("both", "math", 2.0)]
    right = attention.tpi.attention
    tpi = SimpleNamespace(attention=lambda q, k, v, **options: right(q, k, v, causal=mask == "full"))
    monkeypatch.setattr(attention, "tpi", tpi)  # another mask, or none
    with pytest.raises(on_cpu.random_shapes.WrongResult, match="sampled rows of out: error"):
        attention.measure(shape, seed=0, seconds=1)


def test_gradients_and_heads_of_attention_are_checked(on_cpu, monkeypatch):
    attention = on_cpu.random_attention
    shape = attention.Shape(1, 4, 2, 33, 32, "causal")
    right = attention.ours

    def wrong_gradient(shape, q, k, v, grad):
        def once():
            outs = right(shape, q, k, v, grad)()
            return outs if grad is None else [*outs[:2], 1.1 * outs[2], outs[3]]

        return once

    def one_head_differs(shape, q, k, v, grad):
        def once():
            outs = right(shape, q, k, v, grad)()
            return outs if grad is None or q.shape[1] == 4 else [*outs[:3], 1.01 * outs[3]]

        return once

    for wrong, message in ((wrong_gradient, "dk: 0.(1|09)"), (one_head_differs, "dv of a head alone and with others")):
        monkeypatch.setattr(attention, "ours", wrong)
        with pytest.raises(on_cpu.random_shapes.WrongResult, match=message):
            attention.measure(shape, seed=0, seconds=1)


def test_backends_that_refuse_or_are_wrong_are_left_out(on_cpu):
    def refuses():
        raise RuntimeError("no kernel")

    passes = {"refuses": refuses, "wrong": lambda: [1], "right": lambda: [0]}
    name, _ = on_cpu.random_attention.fastest(passes, lambda outs: outs == [0])
    assert name == "right"
    assert on_cpu.random_attention.fastest({"refuses": refuses}, bool) is None


def test_what_is_compiled_ahead(modules, monkeypatch, capsys):
    """By threads here. What fails or comes too late is left for when it is measured."""
    shapes = modules.random_shapes
    threads = lambda workers, context: concurrent.futures.ThreadPoolExecutor(workers)  # noqa: E731
    monkeypatch.setattr(shapes.concurrent.futures, "ProcessPoolExecutor", threads)
    done = []

    def compiles(job):
        if job == "fails":
            raise ValueError("no room")
        done.append(job)

    shapes.compile_ahead(compiles, ["a", "fails", "b"], argparse.Namespace(workers=2, seconds=1000), time.monotonic())
    assert set(done) == {"a", "b"}
    assert re.search(r"compiled 2 of 3 in \d+ s\n  not compiled ahead: no room\n", capsys.readouterr().out)
    done.clear()
    shapes.compile_ahead(compiles, ["a"], argparse.Namespace(workers=1, seconds=1000), time.monotonic())
    assert not done


def test_no_process_waits_for_a_compiler_for_ever(modules, monkeypatch, capsys):
    shapes, may_end = modules.random_shapes, threading.Event()

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            may_end.set()

    monkeypatch.setattr(shapes.concurrent.futures, "ProcessPoolExecutor", lambda workers, context: Pool(workers))
    options = argparse.Namespace(workers=2, seconds=0.0)  # no time at all
    shapes.compile_ahead(lambda job: may_end.wait(300), range(20), options, time.monotonic())
    assert may_end.is_set() and " of 20 in " in capsys.readouterr().out


def test_the_kernels_of_drawn_products(on_cpu, monkeypatch):
    """Each once; with TP_INVARIANT_AUTOTUNE=1 all that are tried; a product that TMA cannot address has its own."""
    gemm = on_cpu.random_gemm

    def tma_operands(a, b, out_dtype):
        kernel = SimpleNamespace(a_transposed=a.stride(0) == 1, b_transposed=b.stride(0) == 1)
        return None if (a.shape[1] % 8 or b.shape[1] % 8) else kernel

    monkeypatch.setattr(gemm, "tma_operands", tma_operands)
    monkeypatch.setattr(gemm, "shared_memory_of", lambda index: 227 * 1024)
    monkeypatch.setattr(gemm.autotune, "_device", lambda index: ("NVIDIA H200", 132, 1 << 20))
    shapes = [gemm.Shape("fwd", "bfloat16", 4096, 4096, k) for k in (5000, 5008, 5001, 5003)]
    found = gemm.jobs(shapes)
    assert [by_tma for _, by_tma in map(gemm.configurations, shapes)] == [True, True, False, False]
    assert len([shape for shape, _ in found if shape.k % 8]) == 1 and 2 <= len(found) <= 3
    with gemm.autotune.autotune():
        tried = gemm.jobs(shapes[:1])
    assert 6 <= len(tried) <= 12 and tried[0][1] == found[0][1]


@pytest.mark.parametrize("script", ("gemm", "attention", "norm"))
def test_a_whole_run(on_cpu, script, monkeypatch, tmp_path, capsys):
    part = getattr(on_cpu, f"random_{script}")
    shapes = {
        "gemm": [on_cpu.random_gemm.Shape("wgrad", "float16", 24, 40, k) for k in (33, 64)],
        "attention": [on_cpu.random_attention.Shape(1, 2, 1, tokens, 32, "causal") for tokens in (5, 40)],
        "norm": [on_cpu.random_norm.Shape(True, "float16", rows, 24) for rows in (33, 40)],
    }[script]
    monkeypatch.setattr(part, "draw", lambda seed, count, *args: shapes[:count])
    monkeypatch.setattr(on_cpu.random_gemm, "jobs", lambda shapes: [])
    monkeypatch.setattr(on_cpu.random_shapes, "DEVICE", "cuda")  # so that --random is taken
    file = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["bench", "--random", "2", "--seed", "5", "--workers", "1", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        getattr(on_cpu, f"bench_{script}").main()
    assert ended.value.code == 0
    written = json.loads(file.read_text())
    assert written["measured"] == 2 and written["seed"] == 5 and written["autotune"] is False
    assert {row["speed"] for row in written["rows"]} == {0.5}
    assert "2 of 2 shapes measured, 0 wrong, 0 skipped" in capsys.readouterr().out
