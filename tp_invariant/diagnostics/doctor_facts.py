"""Facts about this machine for `tp-invariant doctor`, as plain dicts and lists for JSON; no verdicts."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import gather_major, resolve_group
from ..comm.peer_copies import explain_transport
from ..consistency.environment import installed
from ..core import mode
from ..determinism import switches as determinism
from ..functional.attention_choice import safe_attention
from ..gemm.owner_maps import explain_choice
from ..testing.checks import run_ranks
from ..version import __version__

_PACKAGES = ("torch", "triton", "einops", "transformers", "safetensors", "cloudpickle", "rich")

# K, N of the products of Qwen3-8B whose K is sharded: row-parallel layers, and dgrads of column-parallel ones
QWEN3_8B = (
    ("attention output", 4096, 4096),
    ("MLP down", 12288, 4096),
    ("qkv, dgrad", 6144, 4096),
    ("MLP gate and up, dgrad", 24576, 4096),
)


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"tp_invariant": __version__, "python": platform.python_version()}
    found |= {package: installed(package) for package in _PACKAGES}
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0].strip()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpu_count() else None
    return found | {"cuda of torch": torch.version.cuda, "driver": driver or None, "nccl": nccl}


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, platform.processor() or platform.machine())


def devices() -> list[dict[str, Any]]:
    """The CPU, then every GPU."""
    cpu = {
        "device": "cpu",
        "name": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
    }
    found: list[dict[str, Any]] = [cpu]
    for index in range(gpu_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory GiB": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


# --- links ----------------------------------------------------------------------------------------------------------


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """{(GPU, GPU): "NV18", "PIX", ..} from the output of `nvidia-smi topo -m`."""
    rows = [line.split() for line in text.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and (len(row) == 1 or row[1] in ("GPU1", "CPU"))), [])
    columns = [int(name[3:]) for name in header if name.startswith("GPU") and name[3:].isdigit()]
    links = {}
    for row in rows:
        if row is header or not row or not row[0].startswith("GPU") or not row[0][3:].isdigit():
            continue
        for column, link in zip(columns, row[1:], strict=False):
            links[int(row[0][3:]), column] = link
    return links


def links(measure: bool) -> dict[str, Any]:
    """How GPUs are linked, and what moves large blocks; with `measure`, the speed of an all-gather between ranks."""
    count = gpu_count()
    topology = parse_topology(_nvidia_smi("topo", "-m"))
    pairs = []
    for i in range(count):
        for j in range(i + 1, count):
            kind = topology.get((i, j), "unknown")
            pairs.append(
                {
                    "pair": f"cuda:{i} - cuda:{j}",
                    "peer access": torch.cuda.can_device_access_peer(i, j),
                    "link": f"NVLink ({kind})" if kind.startswith("NV") else kind,
                }
            )
    found: dict[str, Any] = {"pairs": pairs, "transport": explain_transport()}
    if measure:
        device, ranks = ("cuda", count) if count > 1 else ("cpu", 2)
        seconds, size = max(run_ranks(_time_gather, ranks, device, device=device))
        moved = size * (ranks - 1) / ranks
        where = f"{ranks} ranks, {'NCCL' if device == 'cuda' else 'gloo on the CPU'}, {size / 1e6:.0f} MB in all"
        found["all-gather"] = {"GB/s received by a rank": round(moved / seconds / 1e9, 2), "of": where}
    return found


def _time_gather(tp_group: Any, device: str) -> tuple[float, int]:
    """On a rank: (the median time of nine all-gathers in seconds, the size of the result in bytes)."""
    group = resolve_group(tp_group)
    local = torch.ones((96 if device == "cuda" else 8) * 2**20 // group.size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        gather_major(local, group)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[4], local.numel() * group.size


# --- settings -------------------------------------------------------------------------------------------------------


def gate() -> dict[str, Any]:
    """The variables, and the mode that follows from them or the error that every layer would raise."""
    names = (mode.MODE_VARIABLE, mode.ALIAS_VARIABLE, mode.CHECK_VARIABLE)
    found: dict[str, Any] = {name: os.environ.get(name) for name in names} | {"mode": None, "error": None}
    try:
        found["mode"] = "on" if mode.is_tp_invariant_mode_enabled() else "off"
        mode.is_call_check_enabled()
    except ValueError as error:
        found["error"] = str(error)
    return found


def settings() -> list[dict[str, Any]]:
    """The rows of determinism.report(), for code around the layers; the layers do not need them."""
    return [
        {
            "setting": row.name,
            "set": row.is_set,
            "now": row.current,
            "wanted": row.wanted,
            "profiles": list(row.profiles),
            "without it": row.meaning,
            "cost": row.cost,
        }
        for row in determinism.report()
    ]


# --- what would run -------------------------------------------------------------------------------------------------

_BACKENDS = {
    "flash": "flash_sdp_enabled",
    "memory-efficient": "mem_efficient_sdp_enabled",
    "cuDNN": "cudnn_sdp_enabled",
    "math": "math_sdp_enabled",
}


def attention(device: str) -> dict[str, Any]:
    """SDPA's backends, and what a parallelized model's attention runs, found in the autograd graph of small calls."""
    half, single = torch.bfloat16, torch.float32
    cases: list[tuple[str, torch.dtype, int, dict[str, Any]]] = [
        ("bfloat16, head size 128, causal", half, 128, {"is_causal": True}),
        ("bfloat16, head size 128, a mask", half, 128, {"attn_mask": torch.ones(16, 16, dtype=torch.bool)}),
        ("bfloat16, head size 128, causal, softcap (Gemma 2)", half, 128, {"is_causal": True, "softcap": 50.0}),
        ("float32, head size 64, causal", single, 64, {"is_causal": True}),
    ]
    chosen = []
    for name, dtype, head_dim, options in cases:
        q, k, v = (torch.randn(1, 2, 16, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
        try:
            runs = _named(safe_attention(q, k, v, **options), device)
        except Exception as error:  # for example no Triton, which the report should show
            runs = f"fails: {type(error).__name__}: {error}"
        chosen.append({"case": name, "runs": runs})
    backends = {name: getattr(torch.backends.cuda, flag)() for name, flag in _BACKENDS.items()}
    return {"SDPA backends enabled": backends, "device": device, "choices": chosen}


def _named(out: Tensor, device: str) -> str:
    nodes = {node.name() for node in _graph(out.grad_fn)}
    if "_AttentionBackward" in nodes:
        kernel = "Triton kernel" if device == "cuda" else "plain torch on its GEMM"
        return f"this library's own, {kernel}"
    return ", ".join(sorted(nodes))


def _graph(node: Any) -> Iterator[Any]:
    if node is not None:
        yield node
        for following, _ in node.next_functions:
            yield from _graph(following)


def gemm(device: str) -> dict[str, Any]:
    """The bundled kernel that computes a 16-bit product, and whether its tiles were measured on this chip."""
    if device == "cpu":
        return {"kernel": "plain torch: BLAS in fixed blocks of K", "tiles measured here": None}
    try:
        from ..kernels.gemm.matmul_table import MEASURED_MULTIPROCESSORS
        from ..kernels.gemm.matmul_tma import tma_operands
    except ImportError as error:
        return {"kernel": f"none: {error}", "tiles measured here": False}
    a, b = (torch.zeros(64, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    properties = torch.cuda.get_device_properties(0)
    on_tma = tma_operands(a, b, torch.bfloat16) is not None
    return {
        "kernel": "Triton with TMA (Hopper)" if on_tma else "Triton, generic",
        "tiles measured here": on_tma and properties.multi_processor_count == MEASURED_MULTIPROCESSORS,
    }


def owner_maps(shapes: Sequence[tuple[str, int, int]], degrees: Sequence[int], tokens: int) -> list[dict[str, Any]]:
    """What owner_map="auto" picks for products of `tokens` rows whose K is sharded, and why."""
    found = []
    for name, k, n in shapes:
        for degree in degrees:
            why = explain_choice(tokens, n, k, degree, scatter_rows=True)  # ends with `auto: ` and the map
            row = {"layer": name, "K": k, "N": n, "tokens": tokens, "TP": degree}
            found.append(row | {"auto": why.rsplit("auto: ", 1)[1].strip(), "why": why})
    return found
