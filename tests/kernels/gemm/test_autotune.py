"""The switch, what is measured, the winner, the cache on disk. A fake timer and launcher stand in for the GPU."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
from matmul_cases import HOPPER, every_config, on_hopper, operands

import tp_invariant as tpi
from tp_invariant.kernels.gemm import autotune as tuning
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig, Product, fits_tma, tma_configs
from tp_invariant.kernels.gemm.matmul_table import LAYOUTS
from tp_invariant.testing import assert_bitwise_equal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CALL = tuning.Call(2048, 1536, 4096, False, True, False, False, BF16, BF16, False, False, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing known, a cache folder of its own, the switch as it was; an H200 as the device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setattr(tuning, "_winners", {})
    if not HOPPER:
        monkeypatch.setattr(tuning, "_device", lambda index: ("NVIDIA H200", 132, 1 << 20))
    tuning._say_once.cache_clear()
    yield
    tuning._set(None)


class Launcher:
    """Takes every configuration, and tells a timer which it was."""

    def __init__(self) -> None:
        self.launched: list[MatmulConfig] = []

    def __call__(self, config: MatmulConfig) -> None:
        self.launched.append(config)


def timer(launcher: Launcher, us_of):
    def microseconds(run):
        run()
        return [us_of(launcher.launched[-1])] * 3

    return microseconds


@pytest.fixture
def fake_gpu(monkeypatch):
    """launcher; .us says what a configuration takes. The last candidate of CALL is the fastest."""
    launcher = Launcher()
    launcher.us = lambda config: 10.0 if config == tuning.candidates(CALL)[-1] else 20.0
    monkeypatch.setattr(tuning, "gpu_timer", lambda index: timer(launcher, lambda config: launcher.us(config)))
    return launcher


def forget():
    """As in another process."""
    tuning._winners.clear()


# --- the switch -------------------------------------------------------------------------------------------------------


def test_the_switch(monkeypatch):
    assert not tuning.is_enabled()
    with tpi.gemm.autotune():
        assert tuning.is_enabled()
        with tpi.gemm.autotune(False):
            assert not tuning.is_enabled()
        assert tuning.is_enabled()
        with pytest.raises(ZeroDivisionError), tpi.gemm.autotune(False):
            1 / 0  # noqa: B018
        assert tuning.is_enabled()
    assert not tuning.is_enabled()
    tpi.gemm.autotune(True)
    assert tuning.is_enabled()
    monkeypatch.setenv(tuning.VARIABLE, "0")
    assert tuning.is_enabled()
    tpi.gemm.autotune(None)
    assert not tuning.is_enabled()
    monkeypatch.setenv(tuning.VARIABLE, "1")
    assert tuning.is_enabled()


def test_wrong_values(monkeypatch):
    with pytest.raises(TypeError, match=re.escape("enabled=1 is not understood: pass True, False or None")):
        tpi.gemm.autotune(1)
    monkeypatch.setenv(tuning.VARIABLE, "yes")
    text = "TP_INVARIANT_AUTOTUNE='yes' is not understood: set it to 1 (on) or 0 (off), or unset it (off)"
    with pytest.raises(ValueError, match=re.escape(text)):
        tuning.is_enabled()
    with tpi.gemm.autotune(False):  # decides, so the variable is not read
        assert not tuning.is_enabled()


def test_other_devices_and_dtypes_are_refused_by_name(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    x = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=F32)
    tuning.check_unmeasured(x)  # off
    with tpi.gemm.autotune(), pytest.raises(NotImplementedError, match=re.escape("on NVIDIA A100 (sm80) no test")):
        tuning.check_unmeasured(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with tpi.gemm.autotune(), caplog.at_level(logging.INFO, "tp_invariant"):
        tuning.check_unmeasured(x)
        tuning.check_unmeasured(SimpleNamespace(is_cuda=True, device="cuda:0", dtype=BF16))
    (record,) = caplog.records
    assert record.message.startswith("autotune: products of torch.float32 keep the usual configuration; measured are")


# --- candidates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_candidates_are_configurations_whose_bits_are_compared(layout):
    """Those of test_matmul_tma.py, and of test_gpu_main_grad.py with accumulation."""
    proven = set(every_config())
    for m, n, k in ((1, 64, 128), (100, 4096, 4096), (129, 512, 4096), (2048, 1536, 4096), (32768, 24576, 4096)):
        for dtype, out_dtype, accumulate in ((BF16, BF16, False), (F16, F32, False), (BF16, F32, True)):
            call = tuning.Call(m, n, k, *layout, False, False, dtype, out_dtype, False, accumulate, 0)
            configs = tuning.candidates(call)
            assert 6 <= len(configs) <= 12 and len(set(configs)) == len(configs) and proven.issuperset(configs)
            assert all(fits_tma(config, out_dtype.itemsize) for config in configs)
            product = Product(m, n, k, *layout, False, False, out_dtype.itemsize, tuning._device(0)[1])
            assert configs[0] == tma_configs(product)[0][1]


def test_accumulation_in_the_layout_that_is_not_compared_is_not_measured(fake_gpu):
    for layout in LAYOUTS:
        call = tuning.Call(2048, 1536, 4096, *layout, False, False, BF16, F32, False, True, 0)
        config = tuning.configuration(call, fake_gpu)
        assert (config is None) == (layout == (False, False)) == (not fake_gpu.launched)
        fake_gpu.launched.clear()


# --- the winner -------------------------------------------------------------------------------------------------------


def test_a_shape_is_measured_once(fake_gpu):
    winner = tuning.candidates(CALL)[-1]
    assert tuning.configuration(CALL, fake_gpu) == winner
    assert set(fake_gpu.launched) == set(tuning.candidates(CALL))
    fake_gpu.launched.clear()
    assert tuning.configuration(CALL, fake_gpu) == winner
    forget()
    assert tuning.configuration(CALL, fake_gpu) == winner  # from the disk
    assert not fake_gpu.launched


def test_without_memory_the_usual_configuration_is_taken(fake_gpu, monkeypatch, caplog, tmp_path):
    """In this process, with one warning; another measures."""

    def full(config):
        raise torch.OutOfMemoryError("no")

    usual = tuning.candidates(CALL)[0]
    for _ in range(2):
        assert tuning.configuration(CALL, full) == usual
    assert caplog.text.count("no memory to measure") == 1 and not list(tmp_path.rglob("*.json"))
    forget()
    assert tuning.configuration(CALL, fake_gpu) == tuning.candidates(CALL)[-1]


def test_a_capture_measures_nothing(fake_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.configuration(CALL, fake_gpu) is None and not fake_gpu.launched
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    winner = tuning.configuration(CALL, fake_gpu)
    assert winner is not None and fake_gpu.launched
    forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.configuration(CALL, fake_gpu) == winner  # known on disk: a capture takes it


# --- the cache --------------------------------------------------------------------------------------------------------


def cached(tmp_path) -> list:
    return sorted((tmp_path / "tp_invariant" / "gemm").iterdir())


@pytest.mark.parametrize(
    "text", ("", "{", "[1]", '{"key": 1}', '{"config": [1]}', "\x00\xff", "another's", "a foreign configuration")
)
def test_a_damaged_file_is_ignored_with_a_line_of_the_log(fake_gpu, tmp_path, caplog, text):
    """So is one with a configuration whose bits are not compared."""
    winner = tuning.configuration(CALL, fake_gpu)
    (file,) = cached(tmp_path)
    before = json.loads(file.read_text())
    if text == "another's":
        text = json.dumps({**before, "key": {**before["key"], "shape": [1, 2, 3]}})
    if text == "a foreign configuration":
        text = json.dumps({**before, "config": astuple(MatmulConfig(32, 32, 32, 4, 2))})
    file.write_text(text, encoding="latin-1")
    fake_gpu.launched.clear()
    forget()
    assert tuning.configuration(CALL, fake_gpu) == winner
    assert fake_gpu.launched and " ignored: " in caplog.text
    assert json.loads(file.read_text())["config"] == before["config"]  # written anew


def test_a_folder_that_cannot_be_written(fake_gpu, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder
    winner = tuning.configuration(CALL, fake_gpu)
    assert "is not kept on disk" in caplog.text
    fake_gpu.launched.clear()
    assert tuning.configuration(CALL, fake_gpu) == winner and not fake_gpu.launched


# --- a product --------------------------------------------------------------------------------------------------------


def test_products_in_the_interpreter(monkeypatch, fake_gpu):
    """The winner computes the product; what is measured leaves the output alone; a switch takes hold at once."""
    if HOPPER:
        pytest.skip("the interpreter runs on machines without a GPU")
    from tp_invariant.kernels.gemm import matmul_tma
    from tp_invariant.kernels.gemm.matmul import matmul

    small = [MatmulConfig(16, 16, 32, 4, 2), MatmulConfig(16, 32, 16, 4, 2)]
    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, n, out_dtype: True)
    monkeypatch.setattr(tuning, "candidates", lambda call: small)
    used = []
    plan = matmul_tma._plan.__wrapped__
    monkeypatch.setattr(matmul_tma, "_plan", lambda *args: (used.append(args[-1]), plan(*args))[1])

    def microseconds(run):
        run()
        return [10.0 if used[-1] == small[1] else 20.0]

    monkeypatch.setattr(tuning, "gpu_timer", lambda index: microseconds)
    a, b = (torch.randint(-8, 9, shape).float() for shape in ((20, 48), (48, 40)))
    out = torch.ones(20, 40)
    assert_bitwise_equal(matmul(a, b), a @ b)
    assert used == [None]
    with tpi.gemm.autotune():
        assert_bitwise_equal(matmul(a, b), a @ b)
        assert used[-1] == small[1] and len(used) > 4
        del used[:]
        assert_bitwise_equal(matmul(a, b), a @ b)
        assert used == [small[1]]
        # into a transposed operand's out, added: another shape of call, which is measured too
        assert_bitwise_equal(matmul(a.t().contiguous().t(), b, out=out, accumulate=True), 1 + a @ b)
        assert used[-1] == small[1] and len(used) > 4
        del used[:]
        assert_bitwise_equal(matmul(a, b, promote_every=128), a @ b)
        assert used == [None]
    matmul(a, b)
    assert used[-1] is None


SECOND_PROCESS = """
import sys, torch
from tp_invariant.kernels.gemm import autotune
from tp_invariant.kernels.gemm.matmul import matmul

def refuse(*args):
    raise AssertionError("measured again")

autotune.measure = refuse
a, b, wanted = torch.load(sys.argv[1])
assert torch.equal(matmul(a, b), wanted)
assert len(autotune._winners) == 1
"""


@on_hopper
def test_on_a_gpu(tmp_path, monkeypatch):
    """Equal bits with and without, in every layout; a file is written, and a second process reads it."""
    from tp_invariant.kernels.gemm import matmul_tma
    from tp_invariant.kernels.gemm.matmul import matmul

    monkeypatch.setattr(tuning, "_MOST", 6)  # fewer to compile
    for number, layout in enumerate(((True, False), (False, False), (False, True))):
        a, b = operands((520, 768, 4096), layout, BF16)
        bias = operands((1, 768, 768), (False, False), BF16)[1][0]
        plain = [matmul(a, b), matmul(a, b, bias=bias, out_dtype=F32)]
        with tpi.gemm.autotune():
            for _ in range(3):
                tuned = [matmul(a, b), matmul(a, b, bias=bias, out_dtype=F32)]
                for x, y in zip(tuned, plain, strict=True):
                    assert_bitwise_equal(x, y, f"{layout}")
        assert len(cached(tmp_path)) == len(tuning._winners) == 2 * (number + 1)
        exact = a.double() @ b.double()
        assert (tuned[0].double() - exact).norm() <= 1.1 * ((a @ b).double() - exact).norm()
    # the control: a launch with a winner differs from the usual one in its configuration, if not in its bits
    call = tuning.Call(520, 768, 4096, False, True, False, False, BF16, BF16, False, False, 0)
    other = next(config for config in tuning.candidates(call) if config != tuning.candidates(call)[0])
    tuning._winners[tuning._key(call)] = other
    used, plan = [], matmul_tma._plan
    monkeypatch.setattr(matmul_tma, "_plan", lambda *args: (used.append(args[-1]), plan(*args))[1])
    with tpi.gemm.autotune():
        assert_bitwise_equal(matmul(a, b), plain[0])
        assert used == [other]
        stream = torch.cuda.Stream()  # a capture of a shape that is new measures nothing
        half = a[:264].contiguous()
        before = len(tuning._winners)
        with tpi.gemm.autotune(False), torch.cuda.stream(stream):
            expected = matmul(half, b)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = matmul(half, b)
        graph.replay()
        assert_bitwise_equal(captured, expected)
        assert len(tuning._winners) == before
        matmul(half, b)
        assert len(tuning._winners) == before + 1  # and the next call outside of a capture measures
    path = tmp_path / "operands.pt"
    torch.save((a, b, plain[0]), path)
    environment = {**os.environ, tuning.VARIABLE: "1"}
    subprocess.run([sys.executable, "-c", SECOND_PROCESS, str(path)], env=environment, check=True, timeout=500)
