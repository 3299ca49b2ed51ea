"""Bitwise comparison, rank pools and invariance checks, for this library's tests and for yours.

def case(tp_group):
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(
        tpi.Linear(256, 512, parallel_mode="column", tp_group=tp_group),
        tpi.Linear(512, 256, parallel_mode="row", tp_group=tp_group),
    )
    y = mlp(torch.randn(8, 256))
    y.square().sum().backward()
    return y, tpi.testing.full_grads(mlp)

def test_my_mlp():
    tpi.testing.assert_tp_invariant(case, degrees=(1, 2, 4))
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.bits import assert_bitwise_equal, assert_leaves_equal, digest, leaves
from ..core.mode import set_tp_invariant_mode
from ..core.variables import SHARE_VARIABLE
from ..gemm.gemm_fn import GemmFn, check_signature, fault_of
from ..layers.parameters import named_shard_specs
from .rank_pool import RankError, discard_pool, packed, pool_lock, shared_pool

# --- ranks ----------------------------------------------------------------------------------------------------------


def default_device() -> str:
    """The device type of `run_ranks`: "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


_MOST_SHARING = 8


def gpu_ranks() -> int:
    """How many ranks `run_ranks` can put on GPUs: one on each, or at least 8 with TP_INVARIANT_RANKS_SHARE_GPUS=1."""
    count = torch.cuda.device_count()
    return max(count, _MOST_SHARING) if count and os.environ.get(SHARE_VARIABLE) == "1" else count


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, device: str | None = None, timeout: float = 300.0
) -> list[Any]:
    """Calls fn(tp_group, *args) on `world_size` rank processes of this machine and returns their results in rank order.

    The processes have one thread each and stay alive for later calls. A pool is as large as the largest world_size so
    far; a call gets the group of the first world_size ranks. Tensors in args and results are copied; keep results on
    the CPU. On device "cuda", rank r's current device is cuda:r and NCCL moves bytes. With
    TP_INVARIANT_RANKS_SHARE_GPUS=1 there may be more ranks than GPUs; gloo then moves bytes, slowly. fn must not call
    dist.new_group, which needs every rank of the pool. The ranks take over the caller's mode and its variables, and
    start from torch's seed 0. The mode, default gemm_fn and default dtype that fn sets are reset before the next call.

    Raises:
        RankError: fn raised on some rank, a rank died, or did not answer within `timeout` seconds; names the ranks.
        TypeError: fn is not callable or world_size is not an int; they may be swapped.
        ValueError: world_size is below 1 or, on GPUs, larger than `gpu_ranks()`.
    """
    device = device or default_device()
    if not callable(fn):
        raise TypeError(f"run_ranks(fn, world_size, *args): fn={fn!r} is not callable; the function comes first")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"run_ranks(fn, world_size, *args): world_size={world_size!r} must be an int")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if device == "cuda" and world_size > gpu_ranks():
        raise ValueError(
            f"world_size={world_size} is more than the {torch.cuda.device_count()} GPUs of this machine; with "
            f"{SHARE_VARIABLE}=1 up to {_MOST_SHARING} ranks may share them"
        )
    with pool_lock:
        work = packed(fn, args)  # an error here leaves the pool usable: nothing has been sent
        pool = shared_pool(world_size, device)
        try:
            outcomes = pool.run(work, world_size, timeout)
        except BaseException:
            # for example Ctrl-C: the next call must not read the answers of this one
            discard_pool(device)
            raise
        errors: dict[int, BaseException] = {}
        ranks_with: dict[str, list[int]] = {}  # by the text of the error, so that equal ones are shown once
        for rank, outcome in enumerate(outcomes):
            if outcome is None:
                errors[rank] = TimeoutError(f"rank {rank} did not answer")
                text = "did not answer; it may be waiting for others in a collective"
            elif outcome.error is not None:
                errors[rank] = outcome.error
                text = (outcome.trace or str(outcome.error)).rstrip()
            else:
                continue
            ranks_with.setdefault(text, []).append(rank)
        parts = []
        for text, ranks in ranks_with.items():
            named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            parts.append(f"{named} of {world_size}:\n{text}")
        if errors:
            if len(errors) < world_size or any(isinstance(e, (TimeoutError, EOFError)) for e in errors.values()):
                discard_pool(device)  # the ranks may be out of step with each other
            raise RankError("\n".join(parts), errors)
        return [outcome.value for outcome in outcomes if outcome is not None]


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a model of this library's layers, unsharded, by name. A collective: call it on every rank."""
    return {name: spec.full(parameter) for name, parameter, spec in named_shard_specs(module)}


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, unsharded, by name; None where there is none. A collective: call it on every rank."""
    return {
        name: None if parameter.grad is None else spec.full(parameter.grad)
        for name, parameter, spec in named_shard_specs(module)
    }


def _to_cpu(obj: Any) -> list[tuple[str, Any]]:
    return [(name, leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf) for name, leaf in leaves(obj)]


def _run_case(tp_group: Any, case: Callable[..., Any], mode: bool, args: tuple) -> list[tuple[str, Any]]:
    with set_tp_invariant_mode(mode):
        return _to_cpu(case(tp_group, *args))


def assert_tp_invariant(
    case: Callable[..., Any],
    *args: Any,
    degrees: Sequence[int] = (1, 2, 4),
    negative_control: bool = True,
    device: str | None = None,
    timeout: float = 300.0,
) -> dict[str, Any]:
    """Asserts that case(tp_group, *args) gives the same bytes at every degree, on every rank; see the module's example.

    `case` builds its model for tp_group and returns a nested structure of tensors that should not depend on the degree:
    full outputs, `full_grads(model)`, losses. With negative_control, the case runs again with the mode off, and some
    result must then differ. If none does, the check proves nothing: make K larger or the exponents wider.

    Returns:
        The first degree's results by name.

    Raises:
        AssertionError: names the result, the degree and rank, and how it differs (see assert_bitwise_equal).
        RankError: the case failed on some rank.
    """
    if len(set(degrees)) < 2:
        raise ValueError(f"degrees={tuple(degrees)!r} leaves nothing to compare: give at least two different ones")
    first = degrees[0]
    reference: dict[str, Any] = {}
    for degree in degrees:
        for rank, result in enumerate(run_ranks(_run_case, degree, case, True, args, device=device, timeout=timeout)):
            reference = reference or dict(result)
            try:
                assert_leaves_equal(dict(result), reference)
            except AssertionError as error:
                raise AssertionError(f"rank {rank} of TP={degree} differs from TP={first}: {error}") from None
    if all(leaf is None or (isinstance(leaf, (Mapping, list, tuple)) and not leaf) for leaf in reference.values()):
        raise AssertionError("the case returns nothing to compare: return outputs, losses or full_grads(model)")
    if negative_control:
        stock = [run_ranks(_run_case, degree, case, False, args, device=device, timeout=timeout) for degree in degrees]
        if len({digest(dict(result[0])) for result in stock}) == 1:
            raise AssertionError(
                f"with the mode off, TP={', '.join(map(str, degrees))} agree too, so this case proves nothing: use a "
                "larger K or data with a wider range of exponents, and check that its layers get tp_group"
            )
    return reference


# --- slice invariance -----------------------------------------------------------------------------------------------


def wide_randn(*shape: int, generator: torch.Generator, spread: int = 8) -> Tensor:
    """Normal values times powers of two from 2^-spread to 2^spread, whose sums depend on the order of summation."""
    device = generator.device
    scale = torch.exp2(torch.randint(-spread, spread + 1, shape, generator=generator, device=device).float())
    return torch.randn(shape, generator=generator, device=device) * scale


_SMALL = ((70, 130, 300), (33, 257, 1024), (5, 3, 17))
_THOROUGH = (*_SMALL, (256, 192, 2048))
_LARGE = {
    "cpu": ((130, 64, 4096), (1040, 512, 2048)),  # the second is larger than 2^19 elements
    "cuda": ((130, 64, 8192), (1040, 512, 2048), (4096, 4096, 4096), (4096, 4096, 8192)),
}


def assert_slice_invariant(
    gemm_fn: GemmFn,
    *,
    shapes: Sequence[tuple[int, int, int]] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    device: torch.device | str | None = None,
    seed: int = 0,
    thorough: bool = False,
) -> None:
    """Asserts that gemm_fn is right and that its c[i, j] depends on a[i, :] and b[:, j] alone.

    Checks the error of the whole product against float64, with and without bias. Compares the whole product byte for
    byte with products of row and column slices, of transposed, unaligned and strided copies of the operands, and on
    other numbers of CPU threads. Passing is evidence, not proof: only some shapes and some data are tried. The bundled
    gemm_fn of CPUs takes some 10 s on two cores, and a minute with thorough=True. Where stderr is a terminal, a line
    there says what is being tried.

    Args:
        gemm_fn: gemm_fn(a, b, *, bias=None, out_dtype=None).
        shapes: (M, N, K) to try, each with many slices. None takes small shapes, and then few slices of some large ones
            (on CUDA up to 4096 x 4096 x 8192), because libraries decide by the size of the product whether to split K.
        dtypes: operand dtypes to try.
        thorough: without `shapes`, try many slices of a product with K = 2048 too.

    Raises:
        TypeError: gemm_fn does not take these arguments.
        AssertionError: names shape, dtype and the first slice that differs, or the error of the product; or says that
            out_dtype or bias is ignored.
    """
    check_signature(gemm_fn)
    large = shapes is None
    shapes = (_THOROUGH if thorough else _SMALL) if shapes is None else shapes
    started = time.monotonic()

    def show(what: str) -> None:
        if sys.stderr.isatty():
            print(f"assert_slice_invariant: {time.monotonic() - started:3.0f} s, {what}", file=sys.stderr)

    if not shapes or not dtypes:
        raise ValueError(f"shapes={shapes!r} and dtypes={dtypes!r} leave nothing to check: give at least one of each")
    device = torch.device(device or default_device())
    generator = torch.Generator().manual_seed(seed)
    for m, n, k in shapes:
        for dtype in dtypes:
            spread = 3 if dtype == torch.float16 else 8  # stay within fp16's range
            a = wide_randn(m, k, generator=generator, spread=spread).to(device, dtype)
            b = wide_randn(k, n, generator=generator, spread=spread).to(device, dtype)
            bias = wide_randn(n, generator=generator, spread=spread).to(device, dtype)
            show(f"many slices of a {(m, k)} @ b {(k, n)}, {dtype}")
            out_dtypes = (dtype,) if dtype == torch.float32 else (dtype, torch.float32)
            for out_dtype in out_dtypes:
                _check_slices(gemm_fn, a, b, bias, out_dtype)
    for dtype in dtypes if large else ():
        show(f"some slices of large products, {dtype}")
        check_large_slices(gemm_fn, dtype, device, seed)


def check_large_slices(gemm_fn: GemmFn, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
    """The part of assert_slice_invariant for large products: few slices, in fp32, since 16 bits hide the order.

    Raises:
        AssertionError: names the shape, the dtype and the slice that differs.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    spread = 3 if dtype == torch.float16 else 8
    for rows, columns, k in _LARGE["cuda" if device.type == "cuda" else "cpu"]:
        a = wide_randn(rows, k, generator=generator, spread=spread).to(dtype)
        b = wide_randn(k, columns, generator=generator, spread=spread).to(dtype)
        whole = gemm_fn(a, b, out_dtype=torch.float32)
        parts = [(m, columns) for m in (1, 16, 64, 128)] + [(rows, n) for n in (1, 16, columns // 2)]
        for m, n in parts:
            part = gemm_fn(a[:m], b[:, :n], out_dtype=torch.float32)
            try:
                assert_bitwise_equal(part, whole[:m, :n].contiguous(), "c")
            except AssertionError as error:
                raise AssertionError(
                    f"not slice-invariant for a {tuple(a.shape)} @ b {tuple(b.shape)}, {dtype}, out_dtype "
                    f"torch.float32: a[:{m}, :] @ b[:, :{n}] differs from the whole product: {error}"
                ) from None


def _slices(size: int) -> list[slice]:
    cuts = {(0, 1), (size // 2, size // 2 + 1), (size - 1, size), (0, size)}
    for parts in (2, 3, 4, 8):
        step = -(-size // parts)
        cuts |= {(start, min(start + step, size)) for start in range(0, size, step)}
    return [slice(*cut) for cut in sorted(cuts)]


def _check_error(
    what: str, c: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, cause: str = ""
) -> None:
    """Raises if c's norm-wise error is more than twice that of torch's product, both rounded to out_dtype."""
    if fault := fault_of(c, a, b, out_dtype):
        raise AssertionError(f"wrong for {what}: gemm_fn {fault}")
    exact = a.double() @ b.double()
    theirs = (a.float() @ b.float()).double()
    if bias is not None:
        exact, theirs = exact + bias.double(), theirs + bias.double()
    ours_error, torch_error = ((x.double() - exact).norm() / exact.norm() for x in (c, theirs.to(c.dtype)))
    # always allowed: a tensor core truncates its fp32 accumulator, by up to sqrt(K) units in the last place
    floor = a.shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    if not ours_error <= max(2 * float(torch_error), floor):
        raise AssertionError(
            f"wrong for {what}: relative error {ours_error:.1e} against torch's {torch_error:.1e}{cause}"
        )


def _check_slices(gemm_fn: GemmFn, a: Tensor, b: Tensor, bias: Tensor, out_dtype: torch.dtype) -> None:
    what = f"a {tuple(a.shape)} @ b {tuple(b.shape)}, {a.dtype}, out_dtype {out_dtype}"

    def check(label: str, left: Tensor, right: Tensor, expected: Tensor, **options: Any) -> None:
        try:
            assert_bitwise_equal(gemm_fn(left, right, out_dtype=out_dtype, **options), expected, "c")
        except AssertionError as error:
            message = f"not slice-invariant for {what}: {label} differs from the whole product: {error}"
            raise AssertionError(message) from None

    whole = gemm_fn(a, b, out_dtype=out_dtype)
    biased = gemm_fn(a, b, bias=bias, out_dtype=out_dtype)
    _check_error(what, whole, a, b, None, out_dtype)
    ignored = "; gemm_fn ignores bias" if torch.equal(whole, biased) else ""
    _check_error(f"{what}, with bias", biased, a, b, bias, out_dtype, ignored)
    for rows in _slices(a.shape[0]):
        check(f"the slice a[{rows.start}:{rows.stop}, :]", a[rows], b, whole[rows])
        check(f"the slice a[{rows.start}:{rows.stop}, :] with bias", a[rows], b, biased[rows], bias=bias)
    for cols in _slices(b.shape[1]):
        check(f"the slice b[:, {cols.start}:{cols.stop}]", a, b[:, cols], whole[:, cols])
        check(f"the slice b[:, {cols.start}:{cols.stop}] with bias", a, b[:, cols], biased[:, cols], bias=bias[cols])
    check("a repeat of the same call", a, b, whole)
    check("a transposed copy of a", a.t().contiguous().t(), b, whole)
    check("a transposed copy of b", a, b.t().contiguous().t(), whole)
    padded = torch.cat([a[:, :1], a], dim=1)[:, 1:]  # rows start at an odd element
    check("an unaligned copy of a", padded, b, whole)
    check("every second row of a copy of a", a.repeat_interleave(2, dim=0)[::2], b, whole)
    if a.device.type == "cpu":
        threads = torch.get_num_threads()
        try:
            for count in sorted({1, 2, threads, threads + 1}):
                torch.set_num_threads(count)
                check(f"the same call on {count} threads", a, b, whole)
        finally:
            torch.set_num_threads(threads)
