"""The benchmarks on drawn shapes: what is drawn, their statistics and report, and that wrong kernels fail.

The passes run on a CPU, Triton's in its interpreter, with a clock that counts calls in place of the GPU's.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

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


# --- statistics, order, report ----------------------------------------------------------------------------------------


def row(us: float, contender_us: float = 10.0) -> list[dict]:
    return [{"case": "fwd", "contender": "cublas", "contender_us": contender_us, "us": us}]


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
        ("window", (20,)),
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
