"""The settings that decide whether a run gives the same bits again: what each one does and what it costs.

Profiles:
    repeat   the same program on the same machine gives the same bits again
    wire     collectives of other code that add (NCCL's all-reduce) add in one order, whatever the size of the message;
             this library's own collectives only move bytes and do not need it
    vllm     `wire`, and what vLLM sets under VLLM_BATCH_INVARIANT=1 and torchtitan sets to match it: for a trainer that
             must agree with such a server. Without vLLM's choice of cuBLASLt, which this library's GEMMs do not use
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

PROFILES = ("repeat", "wire", "vllm")


@dataclass(frozen=True)
class Setting:
    """One row.

    where      "env" or "torch"
    value      what determinism.enable sets
    accepted   other values that are as good, and are not replaced
    default    torch's initial value: any other value that is not accepted was set by the user
    started    the library that reads the setting once, when it starts ("CUDA", "NCCL"); None if it is read at every use
    keep       () -> a function that restores the current state; None if it is enough to write the value that was read
    """

    name: str
    where: str
    value: Any
    why: str
    cost: str
    profiles: tuple[str, ...]
    read: Callable[[], Any]
    write: Callable[[Any], None]
    default: Any = None
    accepted: tuple = ()
    started: str | None = None
    keep: Callable[[], Callable[[], None]] | None = None

    def restorer(self) -> Callable[[], None]:
        """A function that restores the current state."""
        if self.keep is not None:
            return self.keep()
        value = self.read()
        return lambda: self.write(value)

    def holds(self) -> bool:
        """Whether the current value is `value` or one of `accepted`."""
        current = self.read()
        return current == self.value or current in self.accepted


_seen: set[str] = set()


def has_started(what: str) -> bool:
    """Whether CUDA has a context in this process, or NCCL may have a communicator or had one at an earlier call.

    NCCL keeps what it has read for later communicators. One that was created and destroyed between calls is missed.
    """
    if what == "CUDA":
        return torch.cuda.is_initialized()
    if nccl_groups():
        _seen.add(what)
    return what in _seen


def nccl_groups() -> list[dist.ProcessGroup]:
    """The process groups that may have an NCCL communicator."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    return [group for group, config in dist.distributed_c10d._world.pg_backend_config.items() if "nccl" in config]


def _write_env(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _env(
    name: str, value: str, why: str, cost: str, profiles: tuple[str, ...], started: str, *accepted: str
) -> Setting:
    return Setting(
        name,
        "env",
        value,
        why,
        cost,
        profiles,
        read=lambda: os.environ.get(name),
        write=lambda new: _write_env(name, new),
        accepted=accepted,
        started=started,
    )


def _attribute(path: str, value: Any, default: Any, why: str, cost: str, profiles: tuple[str, ...]) -> Setting:
    """A row for an attribute of a torch module, for example "torch.backends.cudnn.benchmark"."""
    module, _, attribute = path.removeprefix("torch.").rpartition(".")

    def owner() -> Any:
        if module.startswith("_inductor"):
            import_module("torch._inductor.config")  # slow to import
        found: Any = torch
        for part in module.split("."):
            found = getattr(found, part)
        return found

    return Setting(
        path,
        "torch",
        value,
        why,
        cost,
        profiles,
        read=lambda: getattr(owner(), attribute),
        write=lambda new: setattr(owner(), attribute, new),
        default=default,
    )


def _switch(
    name: str, write: Callable[[bool], None], read: Callable[[], bool], default: bool, why: str, cost: str
) -> Setting:
    """A row of `repeat` for something that a function turns off."""
    return Setting(name, "torch", False, why, cost, ("repeat",), read=read, write=write, default=default)


def _reduced(dtype: str) -> tuple[Setting, Setting]:
    """allow_*_reduced_precision_reduction and its second flag, for split-K: one attribute in torch, two rows here."""
    matmul = torch.backends.cuda.matmul

    def write(reduced: bool, split: bool) -> None:
        setattr(matmul, name, (reduced, split))

    name = f"allow_{dtype}_reduced_precision_reduction"
    split_k = f"{name}_split_k"
    path = "torch.backends.cuda.matmul."
    return (
        Setting(
            path + name, "torch", False, "cuBLAS may add the parts of a product in 16 bits, depending on the shape",
            "products with a long K and few tiles are somewhat slower", ("repeat", "vllm"), default=True,
            read=lambda: getattr(matmul, name), write=lambda new: write(new, getattr(matmul, split_k)),
        ),
        Setting(
            path + split_k, "torch", False, "cuBLAS may split K, depending on the shape and so on the batch",
            "products with a long K and few tiles are several times slower", ("vllm",), default=True,
            read=lambda: getattr(matmul, split_k), write=lambda new: write(getattr(matmul, name), new),
        ),
    )  # fmt: skip


def _stored_precision(chain: Sequence[Any]) -> str:
    """The fp32_precision that was set on chain[0] itself; "none" if it inherits the value of its parent, chain[1].

    torch shows only the effective value, so the parent's is changed for a moment to see whether chain[0] follows.
    """
    own, *above = chain
    shown: str = own.fp32_precision
    if not above or shown == "none" or above[0].fp32_precision != shown:
        return shown
    before = _stored_precision(above)
    above[0].fp32_precision = "tf32" if shown == "ieee" else "ieee"
    try:
        return shown if own.fp32_precision == shown else "none"
    finally:
        above[0].fp32_precision = before


def _precision(
    name: str,
    read: Callable[[], Any],
    write: Callable[[Any], None],
    default: Any,
    values: dict[str, Any],
    *chains: Sequence[Any],
) -> Setting:
    """A row for an older switch of torch that sets fp32_precision attributes; a user may have set either.

    Reading the switch raises an error if an fp32_precision contradicts it. `values` maps each fp32_precision to the
    switch's value, exact first; `chains` are the modules whose fp32_precision it sets, each followed by its parents.
    """
    exact = values["ieee"]

    def shown() -> Any:
        try:
            return read()
        except RuntimeError:
            found = {chain[0].fp32_precision for chain in chains}
            return next((value for precision, value in reversed(values.items()) if precision in found), exact)

    def put(precisions: Sequence[str]) -> None:
        for chain, precision in zip(chains, precisions, strict=True):
            chain[0].fp32_precision = precision

    def switch() -> Any:
        """The switch's own value, which can be read only while every fp32_precision agrees with it."""
        for precision in values:
            for own, *_ in chains:
                with contextlib.suppress(RuntimeError):  # cuBLAS has no bf16: tf32 stays
                    own.fp32_precision = precision
            with contextlib.suppress(RuntimeError):
                return read()
        return default

    def keep() -> Callable[[], None]:
        stored = [_stored_precision(chain) for chain in chains]
        try:
            before = switch()
        finally:
            put(stored)

        def restore() -> None:
            write(before)
            put(stored)

        return restore

    def set_to(value: Any) -> None:
        write(value)
        for own, *_ in chains if value == exact else ():
            if own.fp32_precision not in ("ieee", "none"):  # inherited
                own.fp32_precision = "ieee"

    return Setting(
        name, "torch", exact, _TF32, _SLOW_FP32, ("repeat", "vllm"),
        read=shown, write=set_to, default=default, keep=keep,
    )  # fmt: skip


_backends: Any = torch.backends
# in torch 2.13 torch.backends.mkldnn.fp32_precision writes to torch.backends.fp32_precision
_mkldnn = _backends._FP32Precision("mkldnn", "all")
_cuda, _cudnn = _backends.cuda, _backends.cudnn  # cudnn.fp32_precision applies to all of CUDA

DETERMINISTIC_ALGORITHMS = Setting(
    "torch.use_deterministic_algorithms",
    "torch",
    (True, False),
    "scatters, index_add and the memory-efficient attention's backward add in the order in which threads arrive; with "
    "warn_only that attention silently keeps its fast order",
    "slower backward of embeddings, scatters and attention (that one: 47 TFLOP/s instead of 133 on an H200), and "
    "an error where torch has no deterministic kernel",
    ("repeat",),
    read=lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    write=lambda new: torch.use_deterministic_algorithms(new[0], warn_only=new[1]),
    default=(False, False),
)


_UNTUNED = "slower compiled kernels, flex attention's too"
_AUTOTUNE = "the kernel that measures fastest is used, which may be one with another order of sums in another run"
_TF32 = "a library may round the operands of fp32 products to TF32, 10 bits"
_SLOW_FP32 = "fp32 products several times slower"
_SWITCHES = "network switches add, in their own order"
_NO_GAIN = "slower NCCL"
_AS_VLLM = "vLLM sets it; without it your sums may have another order than vLLM's"

SETTINGS: tuple[Setting, ...] = (
    DETERMINISTIC_ALGORITHMS,
    _env(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8",
        "cuBLAS shares workspaces between streams, and its order of addition depends on the one that it gets",
        "some 24 MiB of GPU memory", ("repeat", "vllm"), "CUDA", ":16:8",
    ),
    _env("NVIDIA_TF32_OVERRIDE", "0", _TF32, _SLOW_FP32, ("repeat",), "CUDA"),
    _precision(
        "torch.set_float32_matmul_precision", torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision, "highest", {"ieee": "highest", "tf32": "high", "bf16": "medium"},
        (_backends.mkldnn.matmul, _mkldnn, _backends), (_cuda.matmul, _cudnn, _backends),
    ),
    _precision(
        "torch.backends.cudnn.allow_tf32", lambda: _cudnn.allow_tf32,
        lambda new: setattr(_cudnn, "allow_tf32", new), True, {"ieee": False, "tf32": True},
        (_cudnn.conv, _cudnn, _backends), (_cudnn.rnn, _cudnn, _backends),
    ),
    _attribute(
        "torch.backends.cudnn.deterministic", True, False,
        "cuDNN's fast convolution gradients add in the order in which threads arrive", "slower convolutions",
        ("repeat",),
    ),
    _attribute("torch.backends.cudnn.benchmark", False, False, _AUTOTUNE, "slower convolutions", ("repeat",)),
    *_reduced("bf16"),
    *_reduced("fp16"),
    _attribute(
        "torch.backends.cuda.matmul.allow_fp16_accumulation", False, False,
        "cuBLAS may accumulate fp16 products in fp16", "none", ("repeat",),
    ),
    _switch(
        "torch.backends.cuda.enable_cudnn_sdp", _cuda.enable_cudnn_sdp, _cuda.cudnn_sdp_enabled, True,
        "cuDNN attention: 24 of 56 repeats of one call gave another dq on an H200",
        "flash attention takes its place: 0.55 of its forward speed at 8192 tokens on an H200",
    ),
    _switch(
        "torch.backends.cuda.enable_flash_sdp", _cuda.enable_flash_sdp, _cuda.flash_sdp_enabled, True,
        "flash attention gives a head other bits when fewer heads are in the call (dq: 120 of 192)",
        "the memory-efficient kernel takes its place: 0.5 of its forward speed, 0.16 of forward plus backward",
    ),
    _switch(
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp", _cuda.allow_fp16_bf16_reduction_math_sdp,
        _cuda.fp16_bf16_reduction_math_sdp_allowed, False, "math attention may add in 16 bits", "none",
    ),
    _attribute(
        "torch._inductor.config.deterministic", True, False, _AUTOTUNE,
        "slower compiled kernels; torch.compile(mode='max-autotune') still has flex attention tuned: leave it out",
        ("repeat",),
    ),
    *(
        _attribute(f"torch._inductor.config.{name}", False, False, _AUTOTUNE, _UNTUNED, ("repeat",))
        for name in ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
    ),
    _env(
        "NCCL_ALGO", "ring,tree;allreduce:tree",  # since NCCL 2.31 "allreduce:tree" alone leaves others no algorithm
        "NCCL picks the order of an all-reduce's sums by size, ring or tree", "large all-reduces are slower than ring",
        ("wire", "vllm"), "NCCL", "allreduce:tree",
    ),
    _env(
        "NCCL_PROTO", "Simple", "NCCL picks the protocol, and with it the chunks that it adds, by size",
        "small messages take longer", ("wire", "vllm"), "NCCL",
    ),
    *(
        _env(
            name, "1", "NCCL cuts a message into channels by size, each with an order of its own",
            "a fraction of the link's speed", ("wire", "vllm"), "NCCL",
        )
        for name in ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
    ),
    _env(
        "NCCL_LAUNCH_MODE", "GROUP", "GPUs of one process may launch in another order each time", _NO_GAIN,
        ("wire", "vllm"), "NCCL",
    ),
    _env("NCCL_NVLS_ENABLE", "0", _SWITCHES, _NO_GAIN, ("wire", "vllm"), "NCCL"),
    _env("NCCL_COLLNET_ENABLE", "0", _SWITCHES, _NO_GAIN, ("wire", "vllm"), "NCCL"),
    _env("NCCL_P2P_NET_DISABLE", "1", _AS_VLLM, _NO_GAIN, ("vllm",), "NCCL"),
    _env("NCCL_NTHREADS", "1", _AS_VLLM, _NO_GAIN, ("vllm",), "NCCL"),
    _env("NCCL_SOCKET_NTHREADS", "1", _AS_VLLM, _NO_GAIN, ("vllm",), "NCCL"),
    _env(
        "VLLM_ALLREDUCE_USE_SYMM_MEM", "0", "vLLM's own all-reduce adds in another order than NCCL", _NO_GAIN,
        ("vllm",), "NCCL",
    ),
)  # fmt: skip
