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
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.torch_private import INDUCTOR_CONFIG

PROFILES = ("repeat", "wire", "vllm")


class Setting(NamedTuple):
    """One row of the table: an environment variable, or something of torch's, an attribute or a function that sets it.

    profiles   the names of those that set it, in one string
    value      what `enable` sets
    why, cost  what may happen without it, and what it costs
    default    the initial value: any other value that is not accepted was set by the user
    accepted   other values that are as good, and are not replaced
    get, put   read and write it, where `name` alone does not say how
    """

    name: str
    profiles: str
    value: Any
    why: str
    cost: str
    default: Any = None
    accepted: tuple = ()
    get: Callable[[], Any] | None = None
    put: Callable[[Any], None] | None = None

    @property
    def where(self) -> str:
        return "torch" if self.name.startswith("torch.") else "env"

    @property
    def reader(self) -> str:
        """The library that reads the variable once, when it starts; "" where it is read at every use."""
        return "" if self.where == "torch" else "CUDA" if self.name.startswith(("CUBLAS", "NVIDIA")) else "NCCL"

    def read(self) -> Any:
        if self.where == "env":
            return os.environ.get(self.name)
        return self.get() if self.get else resolve_name(self.name)

    def write(self, value: Any) -> None:
        owner, _, name = self.name.rpartition(".")
        if self.where == "env":
            os.environ.pop(self.name, None)
            os.environ.update({} if value is None else {self.name: value})
        elif self.put or self.get:
            (self.put or resolve_name(self.name))(value)
        else:
            setattr(resolve_name(owner), name, value)

    def restore(self, before: Any) -> None:
        if not self.too_late():  # a library keeps what it has read, so the variable stays true
            self.write(before)

    def holds(self) -> bool:
        return self.read() in (self.value, *self.accepted)

    def too_late(self) -> bool:
        """Whether a library has started that has read the variable, or will not read it again."""
        if self.reader == "CUDA":
            return torch.cuda.is_initialized()
        return self.reader == "NCCL" and dist.is_initialized() and "nccl" in dist.get_backend_config()


def _split_k(dtype: str) -> tuple[Setting, Setting]:
    """allow_*_reduced_precision_reduction and its second flag, for split-K: one attribute in torch, two rows here."""
    name, path = f"allow_{dtype}_reduced_precision_reduction", "torch.backends.cuda.matmul"
    first, second = (lambda: getattr(_cuda.matmul, name)), (lambda: getattr(_cuda.matmul, f"{name}_split_k"))
    return (
        Setting(f"{path}.{name}", "repeat vllm", False, "cuBLAS may add parts of a product in 16 bits, by its shape",
                "products with a long K are somewhat slower", True, (), first,
                lambda new: setattr(_cuda.matmul, name, (new, second()))),
        Setting(f"{path}.{name}_split_k", "vllm", False, "cuBLAS may split K by the shape, and so by the batch",
                "products with a long K are several times slower", True, (), second,
                lambda new: setattr(_cuda.matmul, name, (first(), new))),
    )  # fmt: skip


_cuda, _ALGORITHMS = torch.backends.cuda, "torch.use_deterministic_algorithms"
_TF32 = "a library may round the operands of fp32 products to TF32, 10 bits", "fp32 products several times slower"
_AUTOTUNE = "the kernel that measures fastest is used, which may be one with another order of sums in another run"
_CHANNELS = "NCCL cuts a message into channels by size, each with an order of its own", "a fraction of the link's speed"
_SWITCHES = "network switches add, in their own order", "slower NCCL"
_AS_VLLM = "vLLM sets it; without it your sums may have another order than vLLM's", "slower NCCL"

SETTINGS: tuple[Setting, ...] = (
    Setting(_ALGORITHMS, "repeat", (True, False),
            "scatters, index_add and the memory-efficient attention's backward add in the order of threads' arrival",
            "slower backward of embeddings, scatters and attention (that one: 47 TFLOP/s instead of 133 on an H200), "
            "and an error where torch has no deterministic kernel", (False, False), (),
            lambda: (torch.are_deterministic_algorithms_enabled(),
                     torch.is_deterministic_algorithms_warn_only_enabled()),
            lambda new: torch.use_deterministic_algorithms(new[0], warn_only=new[1])),
    Setting("CUBLAS_WORKSPACE_CONFIG", "repeat vllm", ":4096:8", "cuBLAS shares workspaces between streams, and its "
            "order of addition depends on the one that it gets", "some 24 MiB of GPU memory", None, (":16:8",)),
    Setting("NVIDIA_TF32_OVERRIDE", "repeat", "0", *_TF32),
    # torch raises where a user has set another fp32_precision besides: it is an error here, too
    Setting("torch.set_float32_matmul_precision", "repeat vllm", "highest", *_TF32, "highest", (),
            torch.get_float32_matmul_precision),
    Setting("torch.backends.cudnn.allow_tf32", "repeat vllm", False, *_TF32, True),
    Setting("torch.backends.cudnn.deterministic", "repeat", True,
            "cuDNN's fast convolution gradients add in the order of threads' arrival", "slower convolutions", False),
    Setting("torch.backends.cudnn.benchmark", "repeat", False, _AUTOTUNE, "slower convolutions", False),
    *_split_k("bf16"),
    *_split_k("fp16"),
    Setting("torch.backends.cuda.matmul.allow_fp16_accumulation", "repeat", False,
            "cuBLAS may accumulate fp16 products in fp16", "none", False),
    Setting("torch.backends.cuda.enable_cudnn_sdp", "repeat", False, "cuDNN attention: 24 of 56 repeats of one call "
            "gave another dq on an H200", "flash attention takes its place: 0.55 of its forward speed at 8192 tokens",
            True, (), _cuda.cudnn_sdp_enabled),
    Setting("torch.backends.cuda.enable_flash_sdp", "repeat", False,
            "flash attention gives a head other bits when fewer heads are in the call (dq: 120 of 192)",
            "the memory-efficient kernel takes its place: 0.5 of its forward speed, 0.16 of forward plus backward",
            True, (), _cuda.flash_sdp_enabled),
    Setting("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp", "repeat", False,
            "math attention may add in 16 bits", "none", False, (), _cuda.fp16_bf16_reduction_math_sdp_allowed),
    Setting(f"{INDUCTOR_CONFIG}.deterministic", "repeat", True, _AUTOTUNE, "slower compiled kernels; "
            "torch.compile(mode='max-autotune') still has flex attention tuned: leave it out", False),
    *(Setting(f"{INDUCTOR_CONFIG}.{name}", "repeat", False, _AUTOTUNE, "slower compiled kernels", False)
      for name in ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")),
    # since NCCL 2.31 "allreduce:tree" alone leaves other collectives no algorithm
    Setting("NCCL_ALGO", "wire vllm", "ring,tree;allreduce:tree", "NCCL picks the order of an all-reduce's sums by "
            "size, ring or tree", "large all-reduces are slower than ring", None, ("allreduce:tree",)),
    Setting("NCCL_PROTO", "wire vllm", "Simple",
            "NCCL picks the protocol, and with it the chunks that it adds, by size", "small messages take longer"),
    *(Setting(name, "wire vllm", "1", *_CHANNELS) for name in ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")),
    Setting("NCCL_LAUNCH_MODE", "wire vllm", "GROUP", "GPUs of one process may launch in any order", "slower NCCL"),
    *(Setting(name, "wire vllm", "0", *_SWITCHES) for name in ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")),
    *(Setting(f"NCCL_{name}", "vllm", "1", *_AS_VLLM) for name in ("P2P_NET_DISABLE", "NTHREADS", "SOCKET_NTHREADS")),
    Setting("VLLM_ALLREDUCE_USE_SYMM_MEM", "vllm", "0",
            "vLLM's own all-reduce adds in another order than NCCL", "slower NCCL"),
)  # fmt: skip


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
    _set(seed, profiles, warn_only, override)
    _seed_all(seed)


@contextlib.contextmanager
def deterministic(
    seed: int, *, warn_only: bool = False, override: bool = False, profiles: Sequence[str] = ("repeat",)
) -> Iterator[None]:
    """`enable` as a context manager or decorator: leaving restores settings and generators, also on an exception.

    It nests. A variable of the environment stays set if CUDA or NCCL, which keep what they read, has started inside.
    Arguments and errors as for enable.
    """
    with _set(seed, profiles, warn_only, override) as undo:
        undo.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy_random = sys.modules["numpy"].random
            undo.callback(numpy_random.set_state, numpy_random.get_state())
        started = torch.cuda.is_initialized()
        if not started:  # it may start later with the inner seed: give it the CPU's, by then restored
            undo.callback(lambda: torch.cuda.manual_seed_all(torch.initial_seed()))
        undo.enter_context(torch.random.fork_rng(range(torch.cuda.device_count()) if started else ()))
        _seed_all(seed)
        yield


def _selected(profiles: Sequence[str]) -> list[Setting]:
    if isinstance(profiles, str) or not profiles or any(profile not in PROFILES for profile in profiles):
        raise ValueError(f"profiles={profiles!r} is not understood: pass a tuple of {', '.join(map(repr, PROFILES))}")
    return [setting for setting in SETTINGS if set(setting.profiles.split()) & set(profiles)]


def _set(seed: int, profiles: Sequence[str], warn_only: bool, override: bool) -> contextlib.ExitStack:
    """Sets all settings, or raises and sets none; closing the stack restores them in reverse order."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:  # numpy's limit
        raise ValueError(f"seed={seed!r} is not understood: pass an integer from 0 to {2**32 - 1}")
    settings = [
        setting._replace(value=(True, warn_only)) if setting.name == _ALGORITHMS else setting
        for setting in _selected(profiles)
    ]
    wanted = [(setting, setting.read()) for setting in settings if not setting.holds()]
    for setting, current in wanted:
        differs = f"{setting.name} is {current!r} and should be {setting.value!r}"
        # torch's deterministic algorithms on, with or without warn_only, are nobody's conflict
        if current not in (setting.default, (True, True), (True, False)) and not override:
            raise ValueError(f"{differs} ({setting.why}): unset it, or pass override=True to replace it")
        if setting.too_late():
            raise RuntimeError(
                f"{differs}, but {setting.reader} has started in this process and has read it: call this before the "
                f"first use of {setting.reader}, or start the program with {setting.name}='{setting.value}' in its "
                "environment"
            )
    with contextlib.ExitStack() as undo:
        for setting in settings:
            undo.callback(setting.restore, setting.read())
        for setting, _ in wanted:
            setting.write(setting.value)
        return undo.pop_all()


def _seed_all(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device, now or when CUDA starts


def checkpoint_kwargs() -> dict[str, Any]:
    """Keyword arguments for torch.utils.checkpoint.checkpoint, which has no global switch for them.

    The recomputed forward draws the same random numbers as the first one, and an error says so if its tensors have
    other shapes, dtypes or devices.

        checkpoint(block, x, **tpi.determinism.checkpoint_kwargs())
    """
    return {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}


class Row(NamedTuple):
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


class Report(tuple[Row, ...]):
    """The rows of `report()`; prints one line for each row that is set and three for each that is not."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def report(profiles: Sequence[str] = PROFILES) -> Report:
    """The current state of every setting of the profiles; sets nothing, starts nothing.

    A variable that was set after CUDA or NCCL had started counts as set, though the library has not read it.

    Raises:
        ValueError: a profile that does not exist.
    """
    return Report(
        Row(s.name, s.where, s.read(), s.value, s.holds(), not s.holds() and s.too_late(), s.why, s.cost,
            tuple(s.profiles.split()))
        for s in _selected(profiles)
    )  # fmt: skip
