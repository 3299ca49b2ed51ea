"""The settings that make a run give the same bits again: seeds, torch's switches, cuBLAS, NCCL.

    tpi.determinism.enable(seed=0)                 # first thing in main(), on every rank
    with tpi.determinism.deterministic(seed=0): ...
    print(tpi.determinism.report())

The layers alone give the same bits at every TP degree; repeating a run needs these settings too. Give the ranks of one
TP group the same seed, and data-parallel replicas that must differ (dropout) different ones.

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
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from ..core.torch_private import INDUCTOR_CONFIG

PROFILES = ("repeat", "wire", "vllm")
_MAX_SEED = 2**32  # numpy's limit


@dataclass(frozen=True)
class Setting:
    """One row of the table: an environment variable, or something of torch's.

    value      what `enable` sets
    why, cost  what may happen without it, and what it costs
    default    the initial value: any other value that is not accepted was set by the user
    accepted   other values that are as good, and are not replaced
    started    the library that reads the variable once, when it starts ("CUDA", "NCCL"); None: it is read at every use
    get, put   read and write it; without them `name` is a variable or the path of an attribute
    """

    name: str
    value: Any
    why: str
    cost: str
    profiles: tuple[str, ...] = ("repeat",)
    default: Any = None
    accepted: tuple = ()
    started: str | None = None
    get: Callable[[], Any] | None = None
    put: Callable[[Any], None] | None = None

    @property
    def where(self) -> str:
        return "torch" if self.name.startswith("torch.") else "env"

    def read(self) -> Any:
        if self.where == "env":
            return os.environ.get(self.name)
        return self.get() if self.get else getattr(*self._attribute())

    def write(self, value: Any) -> None:
        if self.where == "torch":
            self.put(value) if self.put else setattr(*self._attribute(), value)
        elif value is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = value

    def _attribute(self) -> tuple[Any, str]:
        path, _, name = self.name.rpartition(".")
        if path == INDUCTOR_CONFIG:
            return import_module(path), name  # slow to import
        return attrgetter(path.removeprefix("torch."))(torch), name

    def holds(self) -> bool:
        return self.read() in (self.value, *self.accepted)

    def too_late(self) -> bool:
        """Whether a library has started that has read the variable, or will not read it again."""
        if self.started == "CUDA":
            return torch.cuda.is_initialized()
        return self.started == "NCCL" and dist.is_initialized() and "nccl" in dist.get_backend_config()


def _split_k(dtype: str) -> tuple[Setting, Setting]:
    """allow_*_reduced_precision_reduction and its second flag, for split-K: one attribute in torch, two rows here."""
    matmul, name = torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction"
    first, second = attrgetter(name), attrgetter(f"{name}_split_k")
    return (
        Setting(
            f"torch.backends.cuda.matmul.{name}", False, _IN_16_BITS, "products with a long K are somewhat slower",
            ("repeat", "vllm"), True,
            get=lambda: first(matmul), put=lambda new: setattr(matmul, name, (new, second(matmul))),
        ),
        Setting(
            f"torch.backends.cuda.matmul.{name}_split_k", False, _SPLIT,
            "products with a long K are several times slower", ("vllm",), True,
            get=lambda: second(matmul), put=lambda new: setattr(matmul, name, (first(matmul), new)),
        ),
    )  # fmt: skip


_TF32, _SLOW_FP32 = (
    "a library may round the operands of fp32 products to TF32, 10 bits",
    "fp32 products several times slower",
)
_AUTOTUNE = "the kernel that measures fastest is used, which may be one with another order of sums in another run"
_IN_16_BITS = "cuBLAS may add the parts of a product in 16 bits, depending on the shape"
_SPLIT = "cuBLAS may split K, depending on the shape and so on the batch"
_NO_GAIN, _SWITCHES = "slower NCCL", "network switches add, in their own order"
_AS_VLLM = "vLLM sets it; without it your sums may have another order than vLLM's"
_CHANNELS = "NCCL cuts a message into channels by size, each with an order of its own", "a fraction of the link's speed"
_WIRE: dict[str, Any] = dict(profiles=("wire", "vllm"), started="NCCL")
_VLLM: dict[str, Any] = dict(profiles=("vllm",), started="NCCL")
_cuda = torch.backends.cuda

DETERMINISTIC_ALGORITHMS = Setting(
    "torch.use_deterministic_algorithms", (True, False),
    "scatters, index_add and the memory-efficient attention's backward add in the order in which threads arrive; with "
    "warn_only that attention silently keeps its fast order",
    "slower backward of embeddings, scatters and attention (that one: 47 TFLOP/s instead of 133 on an H200), and an "
    "error where torch has no deterministic kernel", default=(False, False),
    get=lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    put=lambda new: torch.use_deterministic_algorithms(new[0], warn_only=new[1]),
)  # fmt: skip

SETTINGS: tuple[Setting, ...] = (
    DETERMINISTIC_ALGORITHMS,
    Setting(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8",
        "cuBLAS shares workspaces between streams, and its order of addition depends on the one that it gets",
        "some 24 MiB of GPU memory", ("repeat", "vllm"), accepted=(":16:8",), started="CUDA",
    ),
    Setting("NVIDIA_TF32_OVERRIDE", "0", _TF32, _SLOW_FP32, started="CUDA"),
    # torch raises where a user has set another fp32_precision besides: it is an error here, too
    Setting(
        "torch.set_float32_matmul_precision", "highest", _TF32, _SLOW_FP32, ("repeat", "vllm"), "highest",
        get=torch.get_float32_matmul_precision, put=torch.set_float32_matmul_precision,
    ),
    Setting("torch.backends.cudnn.allow_tf32", False, _TF32, _SLOW_FP32, ("repeat", "vllm"), True),
    Setting(
        "torch.backends.cudnn.deterministic", True,
        "cuDNN's fast convolution gradients add in the order in which threads arrive", "slower convolutions",
        default=False,
    ),
    Setting("torch.backends.cudnn.benchmark", False, _AUTOTUNE, "slower convolutions", default=False),
    *_split_k("bf16"),
    *_split_k("fp16"),
    Setting(
        "torch.backends.cuda.matmul.allow_fp16_accumulation", False, "cuBLAS may accumulate fp16 products in fp16",
        "none", default=False,
    ),
    Setting(
        "torch.backends.cuda.enable_cudnn_sdp", False,
        "cuDNN attention: 24 of 56 repeats of one call gave another dq on an H200",
        "flash attention takes its place: 0.55 of its forward speed at 8192 tokens on an H200",
        default=True, get=_cuda.cudnn_sdp_enabled, put=_cuda.enable_cudnn_sdp,
    ),
    Setting(
        "torch.backends.cuda.enable_flash_sdp", False,
        "flash attention gives a head other bits when fewer heads are in the call (dq: 120 of 192)",
        "the memory-efficient kernel takes its place: 0.5 of its forward speed, 0.16 of forward plus backward",
        default=True, get=_cuda.flash_sdp_enabled, put=_cuda.enable_flash_sdp,
    ),
    Setting(
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp", False, "math attention may add in 16 bits", "none",
        default=False, get=_cuda.fp16_bf16_reduction_math_sdp_allowed, put=_cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    Setting(
        f"{INDUCTOR_CONFIG}.deterministic", True, _AUTOTUNE,
        "slower compiled kernels; torch.compile(mode='max-autotune') still has flex attention tuned: leave it out",
        default=False,
    ),
    *(
        Setting(f"{INDUCTOR_CONFIG}.{name}", False, _AUTOTUNE, "slower compiled kernels", default=False)
        for name in ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
    ),
    Setting(
        "NCCL_ALGO", "ring,tree;allreduce:tree",  # since NCCL 2.31 "allreduce:tree" alone leaves others no algorithm
        "NCCL picks the order of an all-reduce's sums by size, ring or tree", "large all-reduces are slower than ring",
        accepted=("allreduce:tree",), **_WIRE,
    ),
    Setting(
        "NCCL_PROTO", "Simple", "NCCL picks the protocol, and with it the chunks that it adds, by size",
        "small messages take longer", **_WIRE,
    ),
    Setting("NCCL_MIN_NCHANNELS", "1", *_CHANNELS, **_WIRE),
    Setting("NCCL_MAX_NCHANNELS", "1", *_CHANNELS, **_WIRE),
    Setting("NCCL_LAUNCH_MODE", "GROUP", "GPUs of one process may launch in any order", _NO_GAIN, **_WIRE),
    Setting("NCCL_NVLS_ENABLE", "0", _SWITCHES, _NO_GAIN, **_WIRE),
    Setting("NCCL_COLLNET_ENABLE", "0", _SWITCHES, _NO_GAIN, **_WIRE),
    Setting("NCCL_P2P_NET_DISABLE", "1", _AS_VLLM, _NO_GAIN, **_VLLM),
    Setting("NCCL_NTHREADS", "1", _AS_VLLM, _NO_GAIN, **_VLLM),
    Setting("NCCL_SOCKET_NTHREADS", "1", _AS_VLLM, _NO_GAIN, **_VLLM),
    Setting(
        "VLLM_ALLREDUCE_USE_SYMM_MEM", "0", "vLLM's own all-reduce adds in another order than NCCL", _NO_GAIN, **_VLLM
    ),
)  # fmt: skip

# What this module has set, by name: a later call may change these values, but not those that a user has set.
_written: dict[str, Any] = {}


def enable(
    seed: int, *, warn_only: bool = False, override: bool = False, profiles: Sequence[str] = ("repeat",)
) -> None:
    """Seeds the generators of python, numpy (if imported) and torch, and sets the settings of `profiles`.

    Call it on every rank before CUDA and NCCL start. If one setting cannot be set, none is. They stay set; inside
    `deterministic`, until that is left.

    Args:
        seed: from 0 to 2**32 - 1; the same on the ranks of a TP group.
        warn_only: torch.use_deterministic_algorithms warns instead of raising where torch has no deterministic kernel;
            the memory-efficient attention's backward is then not deterministic.
        override: replace values that you or your environment set otherwise.
        profiles: of "repeat", "wire", "vllm"; see settings.py.

    Raises:
        ValueError: you have set another value, and override is False; an invalid seed or profile.
        RuntimeError: CUDA or NCCL has already read another value, which override cannot change; says what to do.
    """
    _check_seed(seed)
    _apply(_selected(profiles, warn_only), override)
    _seed_all(seed)


@contextlib.contextmanager
def deterministic(
    seed: int, *, warn_only: bool = False, override: bool = False, profiles: Sequence[str] = ("repeat",)
) -> Iterator[None]:
    """`enable` as a context manager or decorator: leaving restores settings and generators, also on an exception.

    It nests. A variable of the environment stays set if CUDA or NCCL, which keep what they read, has started inside.
    Arguments and errors as for enable.
    """
    _check_seed(seed)
    with _apply(_selected(profiles, warn_only), override) as undo:
        _keep_random_states(undo)
        _seed_all(seed)
        yield


def _selected(profiles: Sequence[str], warn_only: bool) -> list[Setting]:
    if isinstance(profiles, str) or not profiles or any(profile not in PROFILES for profile in profiles):
        raise ValueError(f"profiles={profiles!r} is not understood: pass a tuple of {', '.join(map(repr, PROFILES))}")
    chosen = [setting for setting in SETTINGS if set(setting.profiles) & set(profiles)]
    if warn_only:
        chosen[chosen.index(DETERMINISTIC_ALGORITHMS)] = replace(DETERMINISTIC_ALGORITHMS, value=(True, True))
    return chosen


def _apply(settings: Sequence[Setting], override: bool) -> contextlib.ExitStack:
    """Sets all settings, or raises and sets none; closing the stack restores them in reverse order."""
    for setting in settings:
        current = setting.read()
        if setting.holds():
            continue
        if current != setting.default and current != _written.get(setting.name) and not override:
            raise ValueError(
                f"{setting.name} is {current!r} and should be {setting.value!r} ({setting.why}): unset it, or pass "
                "override=True to replace it"
            )
        if setting.too_late():
            raise RuntimeError(
                f"{setting.name} is {current!r} and should be {setting.value!r}, but {setting.started} has started in "
                f"this process and has read it: call this before the first use of {setting.started}, or start the "
                f"program with {setting.name}='{setting.value}' in its environment"
            )
    undo = contextlib.ExitStack()
    try:
        for setting in settings:
            undo.callback(_written.__setitem__, setting.name, _written.get(setting.name))
            undo.callback(_restore, setting, setting.read())
            if not setting.holds():
                setting.write(setting.value)
                _written[setting.name] = setting.value
    except BaseException:
        undo.close()
        raise
    return undo


def _restore(setting: Setting, before: Any) -> None:
    if not setting.too_late():  # the library keeps what it has read, so the variable stays true
        setting.write(before)


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed={seed!r} is not understood: pass an integer from 0 to {_MAX_SEED - 1}")


def _seed_all(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device, now or when CUDA starts


def _keep_random_states(undo: contextlib.ExitStack) -> None:
    undo.callback(random.setstate, random.getstate())
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        undo.callback(numpy_random.set_state, numpy_random.get_state())
    if not torch.cuda.is_initialized():  # it may start later with the inner seed: give it the CPU's, by then restored
        undo.callback(lambda: torch.cuda.manual_seed_all(torch.initial_seed()))
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def checkpoint_kwargs() -> dict[str, Any]:
    """Keyword arguments for torch.utils.checkpoint.checkpoint, which has no global switch for them.

    The recomputed forward draws the same random numbers as the first one, and an error says so if its tensors have
    other shapes, dtypes or devices.

        checkpoint(block, x, **tpi.determinism.checkpoint_kwargs())
    """
    return {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}


@dataclass(frozen=True)
class Row:
    """The state of one setting: `is_set` says whether `current` is sufficient; `meaning` what happens otherwise."""

    name: str
    where: str
    current: Any
    wanted: Any
    is_set: bool
    too_late: bool
    meaning: str
    cost: str
    profiles: tuple[str, ...]

    def __str__(self) -> str:
        named = f"{self.name} ({self.where}; {', '.join(self.profiles)})"
        if self.is_set:
            return f"set      {named} = {self.current}"
        late = ", too late to set in this process" if self.too_late else ""
        return (
            f"NOT SET  {named} = {self.current}, wanted {self.wanted}{late}\n"
            f"         without it: {self.meaning}\n         with it: {self.cost}"
        )


@dataclass(frozen=True)
class Report:
    """The rows of `report()`; prints one line for each row that is set and three for each that is not."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


def report(profiles: Sequence[str] = PROFILES) -> Report:
    """The current state of every setting of the profiles; sets nothing, starts nothing.

    A variable that was set after CUDA or NCCL had started counts as set, though the library has not read it.

    Raises:
        ValueError: a profile that does not exist.
    """
    return Report(
        tuple(
            Row(
                s.name, s.where, s.read(), s.value, s.holds(), not s.holds() and s.too_late(), s.why, s.cost, s.profiles
            )
            for s in _selected(profiles, warn_only=False)
        )
    )
