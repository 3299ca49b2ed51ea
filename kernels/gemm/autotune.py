"""The fastest tile configuration of a shape, measured on this GPU once and kept on disk. Sets speed, never bits.

How a product of a new shape runs while `autotune` is on:
  1. `configuration` looks for the shape's winner: in this process, then in the cache folder.
  2. If there is none, it launches each candidate on the call's operands, into memory of its own, in turn, and keeps the
     fastest: here and in a file of the cache folder.
  3. The product itself runs, with the winner.

A call in a CUDA graph capture measures nothing: it takes a winner that is known, else the usual configuration.

Candidates are configurations of the table alone (matmul_table.py), and for calls alone for which a test compares the
bits of all of them: test_bytes_of_every_configuration of tests/kernels/gemm/test_matmul_tma.py and
test_gpu_main_grad.py.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import HALF_DTYPES
from .matmul_configs import MatmulConfig, Product, tma_configs

VARIABLE = "TP_INVARIANT_AUTOTUNE"
_VALUES = {None: False, "0": False, "1": True}
_MOST = 12  # configurations that are measured: each takes a second or two to compile
_TURNS = 3
_CALLS = 5  # in a turn
_GAIN = 0.98  # of the usual configuration's time, which less than that is noise

_logger = logging.getLogger("tp_invariant")
_override: bool | None = None
_lock = threading.Lock()  # autograd runs backward on threads of its own
_winners: dict[str, MatmulConfig] = {}


class autotune:
    """Measures tile configurations for shapes that the bundled Hopper GEMM meets, and keeps the fastest on disk.

    True turns it on, False off, None lets `TP_INVARIANT_AUTOTUNE` decide again: `1` is on, `0` or unset off. As a plain
    call it holds until the next one; as a context manager it restores the state before. The variable is read when a
    call with new shapes or strides is prepared; the switch applies from the next call on.

        with tpi.gemm.autotune():
            step()  # meets the model's shapes

    It changes no bits, so ranks need not have the same winners, and none waits for another: nothing is communicated. A
    new shape takes some seconds, most of them for compiling, and memory for one more output; a known one none. It is a
    shape's first product outside of a CUDA graph capture that measures; a capture takes winners that are known, else
    the usual configuration, so warm up before a capture, as graphs need anyway.

    Measured are products of bfloat16 and float16 operands that TMA can address, or copies of them, on a Hopper GPU.
    Others keep the usual configuration: odd sizes that are not copied, operands read in place from several ranks,
    promotion (`bundled(promote_every=)`), and float32, which a line of the log at INFO names. On a CPU it does nothing.

    Winners are files in tp_invariant/gemm of `XDG_CACHE_HOME` (~/.cache), one for each device name, Triton, library
    version, dtypes, layout and shape; delete the folder to measure anew. A damaged file is ignored, with a warning.

    Raises:
        TypeError: `enabled` is not True, False or None.
        ValueError: by a product on a GPU, the variable holds anything else.
        NotImplementedError: by a product, a CUDA device that is not a Hopper GPU: no test has compared the bits there.
    """

    def __init__(self, enabled: bool | None = True) -> None:
        if enabled is not None and not isinstance(enabled, bool):
            raise TypeError(f"enabled={enabled!r} is not understood: pass True, False or None")
        self._enabled, self._before = enabled, _override
        _set(enabled)

    def __enter__(self) -> None:
        _set(self._enabled)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set(self._before)


def _set(enabled: bool | None) -> None:
    global _override
    _override = enabled


def switch() -> bool | None:
    """What the last `autotune` says."""
    return _override


def is_enabled() -> bool:
    """Whether autotuning is on, by the last `autotune`, else by the environment. Raises ValueError for other values."""
    if _override is not None:
        return _override
    text = os.environ.get(VARIABLE)
    if text not in _VALUES:
        raise ValueError(f"{VARIABLE}={text!r} is not understood: set it to 1 (on) or 0 (off), or unset it (off)")
    return _VALUES[text]


# --- what is not measured ---------------------------------------------------------------------------------------------


@functools.cache
def _say_once(text: str) -> None:
    _logger.info(text)


def check_unmeasured(a: Tensor) -> None:
    """For a product that is not the TMA kernel's: says why it is not measured, or refuses its device."""
    if not a.is_cuda or not is_enabled():
        return
    major, minor = torch.cuda.get_device_capability(a.device)
    if major != 9:
        raise NotImplementedError(
            f"autotune: on {torch.cuda.get_device_name(a.device)} (sm{major}{minor}) no test has compared the bits of "
            f"all configurations; allowed: a Hopper GPU (sm90), or turn it off ({VARIABLE}=0, or autotune(False))"
        )
    if a.dtype not in HALF_DTYPES:
        allowed = ", ".join(map(str, HALF_DTYPES))
        _say_once(f"autotune: products of {a.dtype} keep the usual configuration; measured are {allowed}")


# --- one shape --------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What a product's time depends on."""

    m: int
    n: int
    k: int
    a_transposed: bool
    b_transposed: bool
    a_split: bool  # as in matmul_configs.Product
    b_split: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    accumulate: bool
    index: int  # of the device


@functools.cache
def _device(index: int) -> tuple[str, int, int]:
    """Name, multiprocessors and bytes of the L2 cache."""
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.multi_processor_count, properties.L2_cache_size


@functools.cache
def _versions() -> dict[str, str]:
    import triton

    try:
        version = importlib.metadata.version("tp-invariant")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path that was never installed
        version = "unknown"
    return {"triton": triton.__version__, "tp_invariant": version}


def _key(call: Call) -> str:
    name, multiprocessors, _ = _device(call.index)
    facts = {
        "device": name,
        "multiprocessors": multiprocessors,
        **_versions(),
        "dtype": str(call.dtype),
        "out_dtype": str(call.out_dtype),
        "layout": "NT"[call.a_transposed] + "NT"[call.b_transposed],
        "shape": [call.m, call.n, call.k],
        "split": [call.a_split, call.b_split],
        "bias": call.bias,
        "accumulate": call.accumulate,
    }
    return json.dumps(facts, sort_keys=True)


def candidates(call: Call) -> list[MatmulConfig]:
    """Those with the least estimated times; the first is the usual one."""
    product = Product(*call[:7], call.out_dtype.itemsize, _device(call.index)[1])
    return [config for _, config in tma_configs(product)[:_MOST]]


def configuration(call: Call, launch: Callable[[MatmulConfig], object]) -> MatmulConfig | None:
    """The configuration of a call; None is the usual one.

    launch: computes the product with a configuration, into memory that nothing else uses.
    """
    if call.accumulate and not call.a_transposed and not call.b_transposed:
        return None  # the one layout whose bits are not compared with accumulation
    key = _key(call)
    with _lock:
        if (known := _winners.get(key)) is not None:
            return known
        configs = candidates(call)
        winner = _read(key, configs)
        if winner is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return None
            winner = _measured(key, call, configs, launch) or configs[0]  # without memory: for this process
        _winners[key] = winner
        return winner


def _measured(
    key: str, call: Call, configs: list[MatmulConfig], launch: Callable[[MatmulConfig], object]
) -> MatmulConfig | None:
    start = time.monotonic()
    try:
        times = measure(configs, launch, gpu_timer(call.index))
    except torch.OutOfMemoryError:
        times = {}
    usual = configs[0]
    if usual not in times:
        _logger.warning("autotune: no memory to measure %s; it keeps the usual configuration", key)
        return None
    winner = fastest(times, usual)
    _logger.info(
        "autotune: %s: %s takes %.1f us, the usual %s %.1f; %d configurations measured in %.1f s",
        key, winner, times[winner], usual, times[usual], len(times), time.monotonic() - start,
    )  # fmt: skip
    _write(key, winner, times)
    return winner


# --- measuring --------------------------------------------------------------------------------------------------------


def gpu_timer(index: int) -> Callable[[Callable[[], object]], list[float]]:
    """Of a function that launches work on the current stream, the GPU's microseconds for several calls.

    Before each call the L2 cache is cleared, for 0.1 ms, so that the GPU does not wait for the host.
    """
    flushed = torch.empty(2 * _device(index)[2], dtype=torch.int8, device=torch.device("cuda", index))

    def microseconds(run: Callable[[], object]) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_CALLS)]
        for before, after in events:
            for _ in range(4):
                flushed.zero_()
            before.record()
            run()
            after.record()
        events[-1][1].synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in events]

    return microseconds


def measure(
    configs: list[MatmulConfig],
    launch: Callable[[MatmulConfig], object],
    microseconds: Callable[[Callable[[], object]], list[float]],
) -> dict[MatmulConfig, float]:
    """The median time of each configuration that compiles, forwards and backwards in turn, as what comes after a
    product that heats the chip more runs at a lower clock."""
    from triton.errors import TritonError

    times: dict[MatmulConfig, list[float]] = {}
    for config in configs:
        try:
            launch(config)  # compiles
            times[config] = []
        except TritonError as error:  # too much shared memory, say
            _logger.debug("autotune: %s is left out: %s", config, error)
    for turn in range(_TURNS):
        for config in list(times)[:: -1 if turn % 2 else 1]:
            times[config] += microseconds(functools.partial(launch, config))
    return {config: statistics.median(of_calls) for config, of_calls in times.items()}


def fastest(times: dict[MatmulConfig, float], usual: MatmulConfig) -> MatmulConfig:
    """The usual configuration unless another is faster by more than noise."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < _GAIN * times[usual] else usual


# --- on disk ----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """tp_invariant/gemm of XDG_CACHE_HOME, or of ~/.cache where that is unset or no absolute path."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "tp_invariant" / "gemm"


def _file(key: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(key: str, configs: list[MatmulConfig]) -> MatmulConfig | None:
    """The winner on disk, if it is one of the candidates."""
    try:
        file = _file(key)
        entry: Any = json.loads(file.read_text())
        wanted = entry["config"] if entry["key"] == json.loads(key) else None
        winners = [config for config in configs if list(astuple(config)) == wanted]
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        _logger.warning("autotune: the cached configuration of %s is ignored: %s: %s", key, type(error).__name__, error)
        return None
    if not winners:
        _logger.warning("autotune: %s is ignored: it holds no candidate of %s", file, key)
        return None
    return winners[0]


def _write(key: str, winner: MatmulConfig, times: dict[MatmulConfig, float]) -> None:
    """In one step, so that another process, or another rank, reads a whole file or none."""
    seen = [[list(astuple(config)), round(us, 2)] for config, us in sorted(times.items(), key=lambda item: item[1])]
    text = json.dumps({"key": json.loads(key), "config": list(astuple(winner)), "microseconds": seen})
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        os.replace(unfinished, file)
    except (OSError, RuntimeError) as error:  # a folder that is read-only, or no home: this process alone has it
        _logger.warning("autotune: the configuration of %s is not kept on disk: %s", key, error)
