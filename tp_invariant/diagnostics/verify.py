"""The contract, run on this machine: every part of the library at every degree, byte for byte, beside a control.

    tp-invariant verify                     CPU: TP=1, 2, 3, 4, 8 on gloo; two or more GPUs: up to all of them, on NCCL
    tp-invariant verify --quick --only linear-row --gemm-fn my_kernels:matmul

A check holds if all its cases give TP=1's bytes on every rank of every degree, its controls (the mode off, or another
naive way) do not, and its errors against float64 are within bounds of torch's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.options import Normalization, ParallelMode
from ..core.variables import SHARE_VARIABLE
from ..gemm.gemm_fn import GemmFn, bundled_gemm_fn
from ..gemm.owner_maps import OWNER_MAPS
from ..kernels.dtypes import DTYPES
from ..testing.checks import assert_slice_invariant, check_large_slices, gpu_ranks, run_ranks
from .onednn import avoid_trapped_units
from .verify_case import Case, Outcome, check_cases, load_gemm_fn
from .verify_layers import LayerCase
from .verify_parts import AttentionCase, ClipCase, DataParallelCase, EmbeddingCase, LossCase, NormCase
from .verify_training import TrainingCase, check_state

_LARGEST_UNIT = 48  # sizes are multiples of all degrees


@dataclass(frozen=True)
class Setup:
    """What to run. `gemm_fn` is "module:name" or None, the bundled one."""

    degrees: tuple[int, ...]
    device: str
    seed: int = 0
    quick: bool = False
    gemm_fn: str | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """All that are checked; `quick` checks all but the first in a single case."""
        return (torch.float32, torch.bfloat16) if self.device == "cpu" else DTYPES

    @property
    def unit(self) -> int:
        """A number that every degree divides."""
        return math.lcm(*self.degrees)

    def multiple(self, usual: int, of: int = 1) -> int:
        """A number near `usual` that every degree times `of` divides."""
        return -(-usual // (self.unit * of)) * self.unit * of

    def features(self, stride: int = 1) -> int:
        """A number near the usual width, several blocks of K, that every degree times stride divides.

        On a CPU it is above 384: up to that MKL adds the two halves of K on some chips, as the control's two ranks do.
        On GPUs each rank has a multiple of 16, so that the kernels that read in place, or by TMA, are used.
        """
        return self.multiple(400, stride) if self.device == "cpu" else self.multiple(2048, 16 * stride)

    def each_dtype(self, make: Callable[..., Sequence[Case]]) -> list[Case]:
        """make(dtype=.., device=.., seed=..) for each dtype; `quick` keeps one case of each dtype after the first."""
        made = [make(dtype=dtype, device=self.device, seed=self.seed) for dtype in self.dtypes]
        if self.quick:
            made[1:] = [cases[:1] for cases in made[1:]]
        return list(itertools.chain(*made))

    def check(self, make: Callable[..., Sequence[Case]]) -> Outcome:
        """check_cases of each_dtype(make)."""
        return check_cases(self.each_dtype(make), self.degrees, self.gemm_fn)


@dataclass(frozen=True)
class Check:
    name: str
    what: str
    run: Callable[[Setup], Outcome]


# --- the checks -----------------------------------------------------------------------------------------------------


def _splits_by_rows(gemm_fn: GemmFn) -> GemmFn:
    """The control: a gemm_fn that adds two halves of K if there are many rows."""

    def split(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        half = a.shape[1] // 2
        if a.shape[0] < 16 or not half:
            return gemm_fn(a, b, bias=bias, out_dtype=out_dtype)
        c = gemm_fn(a[:, :half], b[:half], out_dtype=torch.float32)
        c = c + gemm_fn(a[:, half:], b[half:], out_dtype=torch.float32)
        return (c if bias is None else c + bias.float()).to(out_dtype or a.dtype)

    return split


def check_gemm(setup: Setup) -> Outcome:
    gemm_fn = load_gemm_fn(setup.gemm_fn) or bundled_gemm_fn(torch.device(setup.device))
    shapes = [(33, 65, 300)] if setup.quick else [(33, 65, 300), (70, 130, 1024), (5, 3, 17)]
    options: dict[str, Any] = dict(device=setup.device, seed=setup.seed)
    assert_slice_invariant(gemm_fn, shapes=shapes, dtypes=setup.dtypes, **options)
    for dtype in setup.dtypes[:1] if setup.quick else setup.dtypes:
        check_large_slices(gemm_fn, dtype, setup.device, setup.seed)
    for dtype in setup.dtypes:
        try:
            assert_slice_invariant(_splits_by_rows(gemm_fn), shapes=shapes[:1], dtypes=[dtype], **options)
        except AssertionError as difference:
            if "not slice-invariant" not in str(difference):
                raise
        else:
            raise AssertionError(f"the control, a gemm_fn that splits K by its number of rows, passes in {dtype}")
    # tensors and bytes are not counted here: slices of a few products
    return Outcome(cases=len(shapes) * len(setup.dtypes), controls=len(setup.dtypes))


def _layer_cases(
    setup: Setup, parallel_mode: ParallelMode, norm: Normalization | None, base: dict[str, Any]
) -> Iterator[Case]:
    unit = setup.unit
    for stride in (2,) if setup.quick else (2, 1):
        sizes = (setup.features(), setup.features(stride))
        k, n = sizes if parallel_mode == "column" else sizes[::-1]
        case = LayerCase(parallel_mode, k, n, (2 * unit,), stride=stride, norm=norm, **base)
        for owner_map in OWNER_MAPS:
            yield case.with_(owner_map=owner_map, sequence_parallel=True)
            if not setup.quick or owner_map == "auto":
                yield case.with_(owner_map=owner_map, tokens=(3, 7))
    if setup.quick:
        return
    yield case.with_(tokens=(1,))
    yield case.with_(sequence_parallel=True, sequence_dim=1, tokens=(3, unit), bias=False)
    n = setup.multiple(272, 2)
    odd = (53, n) if parallel_mode == "column" else (n, 53)
    yield LayerCase(parallel_mode, *odd, (35,), stride=2, late_stride=True, return_bias=True, norm=norm, **base)
    if norm:
        for gathered in (False, True):
            options: dict[str, Any] = dict(return_norm=True, return_norm_gathered=gathered, zero_centered=gathered)
            yield case.with_(sequence_parallel=True, **options)
    else:
        yield case.with_(**({"gather_output": True} if parallel_mode == "column" else {"input_is_parallel": False}))


def check_layers(setup: Setup, parallel_mode: ParallelMode, norms: Sequence[Normalization | None]) -> Outcome:
    return setup.check(lambda **base: [c for norm in norms for c in _layer_cases(setup, parallel_mode, norm, base)])


def check_norm(setup: Setup) -> Outcome:
    tokens, width = setup.multiple(64), setup.features()

    def cases(**base: Any) -> Sequence[Case]:
        heads = [NormCase(norm, 40, 64, heads=setup.multiple(16), **base) for norm in ("RMSNorm", "LayerNorm")]
        return [NormCase(norm, tokens, width, **base) for norm in ("RMSNorm", "LayerNorm")] + heads

    return setup.check(cases)


def check_vocabulary(setup: Setup) -> Outcome:
    rows, tokens, vocabulary = setup.multiple(72), setup.multiple(80), setup.multiple(536)

    def cases(**base: Any) -> list[Case]:
        embeddings = [EmbeddingCase(rows, 24, tokens, sp, **base) for sp in (True, False)]
        return [LossCase(vocabulary, 200, **base), *embeddings, LossCase(setup.multiple(136), 200, 0.0, **base)]

    return setup.check(cases)


def check_attention(setup: Setup) -> Outcome:
    unit = setup.unit

    def cases(**base: Any) -> list[Case]:
        sequence = 33 if setup.device == "cpu" else 513
        grouped = AttentionCase(2 * unit, unit, sequence, 20 if setup.device == "cpu" else 128, **base)
        return [grouped, AttentionCase(unit, unit, sequence, 64, is_causal=False, **base)]

    return setup.check(cases)


def check_data_parallel(setup: Setup) -> Outcome:
    counts = (max(8, setup.unit), 11)  # the second is one that degrees do not divide

    def cases(**base: Any) -> list[Case]:
        return [DataParallelCase(max(count, *setup.degrees), 64, **base) for count in counts]

    return setup.check(cases)


def _training(setup: Setup, **base: Any) -> TrainingCase:
    return TrainingCase(setup.unit, layers=1 if setup.quick else 2, steps=2 if setup.quick else 3, **base)


def check_training(setup: Setup) -> Outcome:
    def cases(**base: Any) -> list[Case]:
        case = _training(setup, **base)
        return [case.with_(sequence_parallel=True), case]

    made = setup.each_dtype(cases)
    return check_cases(made[:1] if setup.quick else made, setup.degrees, setup.gemm_fn)


def check_resuming(setup: Setup, to_disk: bool) -> Outcome:
    case = _training(setup, dtype=setup.dtypes[0], device=setup.device, seed=setup.seed).with_(layers=1)
    degrees = (1, max(setup.degrees)) if setup.quick else setup.degrees
    return check_state(case, degrees, to_disk=to_disk, gemm_fn=setup.gemm_fn)


CHECKS = (
    Check("gemm", "the gemm_fn: slices, strides, threads; against float64", check_gemm),
    Check(
        "linear-column",
        "Linear: forward, dgrad, wgrad, bias; SP, gated, every owner map",
        lambda setup: check_layers(setup, "column", [None]),
    ),
    Check("linear-row", "the same, row-parallel", lambda setup: check_layers(setup, "row", [None])),
    Check(
        "layernorm-linear",
        "LayerNormLinear with LayerNorm and RMSNorm: also gamma and beta",
        lambda setup: check_layers(setup, "column", ["RMSNorm"] if setup.quick else ["RMSNorm", "LayerNorm"]),
    ),
    Check("norm", "ParallelNorm over this rank's tokens, and over its heads", check_norm),
    Check("vocabulary", "VocabParallelEmbedding and vocab_parallel_cross_entropy", check_vocabulary),
    Check("clipping", "clip_grad_norm_", lambda s: s.check(lambda **base: [ClipCase(s.multiple(64), **base)])),
    Check("attention", "safe_attention over this rank's heads", check_attention),
    Check("training", "steps of a transformer that parallelize sharded: losses, gradients, parameters", check_training),
    Check("state", "full state dicts taken at one degree, loaded at another", lambda s: check_resuming(s, False)),
    Check("checkpoint", "a checkpoint written at one degree, loaded at another", lambda s: check_resuming(s, True)),
    Check("data-parallel", "MicroBatchTree: gradients at every data-parallel degree", check_data_parallel),
)


# --- running them ---------------------------------------------------------------------------------------------------


def _start(tp_group: Any) -> None:
    """Does nothing; calling it starts the pool."""


def run_checks(checks: Sequence[Check], setup: Setup) -> list[str]:
    """Runs each check and prints its result; returns the names of those that failed. An error fails only its check."""
    failed = []
    for check in checks:
        start = time.monotonic()
        if sys.stdout.isatty():
            print(f"..      {check.name}", end="\r", flush=True)
        try:
            run_ranks(_start, max(setup.degrees), device=setup.device)  # one pool, also after a failure that ended it
            lines, word = [str(check.run(setup))], "held"
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            lines, word = ["", *f"{kind}{error}".splitlines()], "FAILED"
            failed.append(check.name)
        seconds = time.monotonic() - start
        print(f"{word:<8}{check.name:<17}{seconds:6.1f} s  " + "\n        ".join(lines), flush=True)
    return failed


def _named(degrees: Sequence[int]) -> str:
    return f"TP={', '.join(map(str, degrees))}"


def print_heading(setup: Setup) -> None:
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in setup.dtypes)
    where = "the CPU (gloo)"
    if setup.device == "cuda":
        gpus = torch.cuda.device_count()
        by = "NCCL" if setup.degrees[-1] <= gpus else f"gloo, {setup.degrees[-1]} ranks share {gpus} GPUs"
        where = f"{torch.cuda.get_device_name()} ({by})"
    gemm_fn = setup.gemm_fn or "bundled"
    print(f"{_named(setup.degrees)} on {where}; {dtypes}; seed {setup.seed}; gemm_fn {gemm_fn}", flush=True)


# --- the command ----------------------------------------------------------------------------------------------------


def _degrees(text: str) -> tuple[int, ...]:
    degrees = sorted({int(part) for part in text.split(",")})
    if degrees[0] < 1:
        raise ValueError(text)
    return tuple(degrees)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tp-invariant verify",
        description="Run the contract on this machine: the same bytes at every tensor-parallel degree.",
        epilog="Exit status: 0 if every check held, its controls differed and its errors are within bounds; 1 if not; "
        "2 for a wrong option.",
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there are two or more GPUs, else cpu")
    add(
        "--degrees",
        type=_degrees,
        metavar="P,P,..",
        help="to compare with TP=1 (default on a CPU: 1,2,3,4,8, with --quick 1,2,3,4; on GPUs: 3 and powers of two)",
    )
    add("--quick", action="store_true", help="fewer cases of each check: a minute on two cores, instead of four")
    names = [check.name for check in CHECKS]
    add("--only", action="append", choices=names, metavar="NAME", help="this check alone; may be repeated")
    add("--list", action="store_true", help="list the checks and run none")
    add("--seed", type=int, default=0, metavar="N", help="seed of all data (default: 0)")
    add("--gemm-fn", metavar="MODULE:NAME", help="your gemm_fn for every GEMM, instead of the bundled one")
    return parser


def _setup(options: argparse.Namespace, error: Callable[[str], Any]) -> Setup:
    gpus = gpu_ranks()
    device = options.device or ("cuda" if gpus > 1 else "cpu")
    if device == "cuda" and gpus < 2:
        error(
            f"--device cuda: torch sees {gpus} GPUs here, and comparing degrees takes two; tp-invariant doctor checks "
            f"what one GPU can show, {SHARE_VARIABLE}=1 lets ranks share it, --device cpu runs the contract on the CPU"
        )
    most = (4 if options.quick else 8) if device == "cpu" else gpus
    usual = [3, *(2**i for i in range(most.bit_length()))]  # 3: a degree that is not a power of two
    degrees = tuple(sorted({1, *(options.degrees or (degree for degree in usual if degree <= most))}))
    if len(degrees) == 1:
        error("--degrees 1 leaves nothing to compare: give one more, as in 1,2")
    if device == "cuda" and degrees[-1] > gpus:
        error(f"--degrees: {degrees[-1]} is more than the {gpus} GPUs here")
    if math.lcm(*degrees) > _LARGEST_UNIT:
        error(f"--degrees: sizes are multiples of all of them, {math.lcm(*degrees)}, which is too large; give fewer")
    if options.gemm_fn is not None:
        sys.path.append(os.getcwd())  # for a module of the user's; last, so that it hides nothing
        try:
            load_gemm_fn(options.gemm_fn)
        except ValueError as problem:
            error(f"--gemm-fn: {problem}")
    return Setup(degrees, device, options.seed, options.quick, options.gemm_fn)


def _chosen(only: Sequence[str] | None, error: Callable[[str], Any]) -> list[Check]:
    chosen = [check for check in CHECKS if not only or check.name in only]
    if importlib.util.find_spec("safetensors") is None and any(check.name == "checkpoint" for check in chosen):
        if only:
            error("--only checkpoint needs safetensors: pip install safetensors")
        print("checkpoint is not run: it needs safetensors (pip install safetensors)")
        chosen = [check for check in chosen if check.name != "checkpoint"]
    return chosen


def main(argv: Sequence[str]) -> int:
    """The `verify` command; exit statuses as its help says, and 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    if options.list:
        print("\n".join(f"{check.name:<17} {check.what}" for check in CHECKS))
        return 0
    setup = _setup(options, parser.error)
    chosen = _chosen(options.only, parser.error)
    degrees = _named(setup.degrees)
    start = time.monotonic()
    try:
        print_heading(setup)
        avoid_trapped_units()
        failed = run_checks(chosen, setup)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    took = f"{time.monotonic() - start:.0f} s"
    if failed:
        print(f"Verdict: FAILED: {', '.join(failed)} ({len(failed)} of {len(chosen)} checks, {took})")
        return 1
    print(f"Verdict: all {len(chosen)} checks held: {degrees} are byte for byte the same on every rank ({took})")
    return 0
