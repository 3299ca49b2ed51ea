"""Digests of what the bundled kernels compute on fixed inputs: one line of text for each result, to compare machines.

    tp-invariant fingerprint --output here.txt                          on one machine
    tp-invariant fingerprint --compare here.txt                         on another, or with another version
    tp-invariant fingerprint --model tensor-core --compare gpu.txt      on a CPU: did that GPU do what a Hopper does?

A line is `result dtype shape digest`; lines that start with # say where they come from. The inputs are hashes of their
place and name, made into floating-point numbers by their bits: no generator of random numbers, no rounding, the same
everywhere. So equal digests are equal bits, and the bits of two machines are as alike as their files.
"""

from __future__ import annotations

import argparse
import platform
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .bits import digest
from .collectives import resolve_group
from .cross_entropy import vocab_parallel_cross_entropy
from .gemm import BUNDLED_DTYPES, GemmFn, bundled_gemm_fn
from .layout import TokenSharding
from .mode import set_tp_invariant_mode
from .norm import Norm, NormCall
from .version import __version__

GEMM_SHAPES = ((96, 160, 1000), (33, 65, 257), (32, 48, 4096))  # M, N, K
ROW_SHAPES = ((96, 1000), (33, 257), (10, 4096))  # tokens, features


@dataclass(frozen=True)
class Line:
    """One result: `name` says of what, `shape` is that of the problem, not of the result."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    @property
    def key(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        return f"{self.key} {self.digest}"


# --- inputs ---------------------------------------------------------------------------------------------------------


def hashed(name: str, count: int) -> Tensor:
    """`count` well-mixed integers of 32 bits, int64, that depend on the name and their place alone.

    Two rounds of xor-shift and multiply, as in MurmurHash3's last step; the factors are below 2^31, so that no product
    passes 2^63.
    """
    x = torch.arange(count, dtype=torch.int64) * 0x1E3779B9 + zlib.crc32(name.encode()) & 0xFFFFFFFF
    for factor, shift in ((0x21F0AAAD, 16), (0x735A2D97, 15)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x ^ x >> 15


def hashed_floats(name: str, shape: tuple[int, ...], dtype: torch.dtype, exponents: tuple[int, int]) -> Tensor:
    """Numbers with hashed signs and fractions, and exponents in [low, high), a power of two apart.

    bfloat16, float16 or float32, all of them normal.
    """
    digits, bias, bits = {
        torch.bfloat16: (7, 127, torch.int16),
        torch.float16: (10, 15, torch.int16),
        torch.float32: (23, 127, torch.int32),
    }[dtype]
    low, high = exponents
    count = 1
    for size in shape:
        count *= size
    x = hashed(name, count)
    field = (x >> 23 & high - low - 1) + low + bias  # the fraction has the bits below, the sign the highest
    magnitude = field << digits | x & (1 << digits) - 1
    return (magnitude - (x >> 31 << 8 * dtype.itemsize - 1)).to(bits).view(dtype).view(shape)


def _wide(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Exponents so wide that another order of summation shows, and sums within the dtype's range."""
    return hashed_floats(name, shape, dtype, (-4, 4) if dtype == torch.float16 else (-8, 8))


# --- results --------------------------------------------------------------------------------------------------------


def gemm_lines(gemm_fn: GemmFn, dtypes: Sequence[torch.dtype], device: str) -> Iterator[Line]:
    """The three layouts of a linear layer's products, bias, and fp32 output, in a fixed order."""
    for dtype in dtypes:
        for m, n, k in GEMM_SHAPES:

            def operand(name: str, *shape: int, dtype: torch.dtype = dtype, at: str = f"{m}x{n}x{k}") -> Tensor:
                return _wide(f"{at} {name}", shape, dtype).to(device)

            bias = operand("bias", n)
            results = {
                "gemm.forward": (operand("x", m, k), operand("weight", n, k).t(), None, dtype),
                "gemm.forward+bias": (operand("x", m, k), operand("weight", n, k).t(), bias, dtype),
                "gemm.dgrad": (operand("dy", m, k), operand("w", k, n), None, dtype),
                "gemm.wgrad": (operand("dyt", k, m).t(), operand("xt", k, n), None, dtype),
                "gemm.wgrad.float32": (operand("dyt", k, m).t(), operand("xt", k, n), None, torch.float32),
            }
            for name, (a, b, extra, out_dtype) in results.items():
                if name != "gemm.wgrad.float32" or dtype != torch.float32:  # the line before already
                    c = gemm_fn(a, b, bias=extra, out_dtype=out_dtype)
                    yield Line(name, dtype, (m, n, k), digest(c))


def norm_lines(dtypes: Sequence[torch.dtype], device: str) -> Iterator[Line]:
    """LayerNorm and RMSNorm, forward and backward."""
    for name, rms in (("layernorm", False), ("rmsnorm", True)):
        call = NormCall(resolve_group(None), TokenSharding(1, 0), 1e-5, rms, False)
        for dtype in dtypes:
            for rows, features in ROW_SHAPES:
                at = f"{rows}x{features}"
                x = _wide(f"{at} x", (rows, features), dtype).to(device).requires_grad_()
                weight = _wide(f"{at} weight", (features,), dtype).to(device).requires_grad_()
                bias = None if rms else _wide(f"{at} bias", (features,), dtype).to(device).requires_grad_()
                y = Norm.apply(x, weight, bias, call)
                inputs = {"dx": x, "dweight": weight} | ({} if bias is None else {"dbias": bias})
                grads = torch.autograd.grad(y, list(inputs.values()), _wide(f"{at} dy", y.shape, dtype).to(device))
                for result, value in zip(("y", *inputs), (y, *grads), strict=True):
                    yield Line(f"{name}.{result}", dtype, (rows, features), digest(value))


def loss_lines(dtypes: Sequence[torch.dtype], device: str) -> Iterator[Line]:
    """Cross-entropy with label smoothing, forward and backward."""
    for dtype in dtypes:
        for rows, vocab in ROW_SHAPES:
            at = f"{rows}x{vocab}"
            logits = hashed_floats(f"{at} logits", (rows, vocab), dtype, (-4, 4)).to(device).requires_grad_()
            target = (hashed(f"{at} target", rows) % vocab).to(device)
            with set_tp_invariant_mode(True):
                loss = vocab_parallel_cross_entropy(
                    logits, target, tp_group=None, label_smoothing=0.125, reduction="none"
                )
            dloss = hashed_floats(f"{at} dloss", (rows,), torch.float32, (-4, 4)).to(device, loss.dtype)
            (dlogits,) = torch.autograd.grad(loss, logits, dloss)
            yield Line("cross_entropy.loss", dtype, (rows, vocab), digest(loss))
            yield Line("cross_entropy.dlogits", dtype, (rows, vocab), digest(dlogits))


def fingerprint(device: str) -> list[Line]:
    """Every line of the kernels bundled for `device`, always in the same order."""
    return [
        *gemm_lines(bundled_gemm_fn(torch.device(device)), BUNDLED_DTYPES, device),
        *norm_lines(BUNDLED_DTYPES, device),
        *loss_lines(BUNDLED_DTYPES, device),
    ]


def tensor_core_fingerprint() -> list[Line]:
    """The lines that the tensor cores of a Hopper GPU decide, as its CPU model computes them: 16-bit GEMMs."""
    from .kernels.tensor_core import DTYPES, matmul

    return list(gemm_lines(matmul, DTYPES, "cpu"))


def header(device: str, model: str | None) -> list[str]:
    if model is not None:
        where = "the CPU model of Hopper's tensor core"
    elif device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        where = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    else:
        where = f"cpu, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return [f"# tp_invariant {__version__}", f"# torch {torch.__version__}", f"# triton {_triton()}", f"# {where}"]


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


# --- the command ----------------------------------------------------------------------------------------------------


class FileFormatError(ValueError):
    """A file that is no fingerprint."""


def read_lines(path: str) -> dict[str, str]:
    """{"result dtype shape": digest} of a file that this command wrote.

    Raises:
        FileFormatError: a line that is no such line.
    """
    found = {}
    for number, text in enumerate(Path(path).read_text(errors="replace").splitlines(), 1):
        if text.startswith("#") or not text.strip():
            continue
        key, _, value = text.rpartition(" ")
        if len(key.split(" ")) != 3 or len(value) != 64:
            raise FileFormatError(
                f"{path}, line {number}: {text!r} is no line of a fingerprint, which is: result dtype shape digest"
            )
        found[key] = value
    return found


def compare(lines: Sequence[Line], theirs: dict[str, str], path: str) -> int:
    """Prints which lines differ from those of the file; 0 if those that both have agree, 1 if not or there is none."""
    shared = [line for line in lines if line.key in theirs]
    differ = [line for line in shared if line.digest != theirs[line.key]]
    for line in differ:
        print(f"differs: {line.key}: {line.digest[:12]} here, {theirs[line.key][:12]} in {path}")
    only = len(theirs) - len(shared)
    print(f"{len(shared) - len(differ)} of {len(shared)} results are the same bits as in {path}", end="")
    print(f"; {len(lines) - len(shared)} are only here and {only} only there")
    return 1 if differ or not shared else 0


def main(argv: Sequence[str]) -> int:
    """The `fingerprint` command. Exit status 1: --compare found differences, or nothing to compare; 2: bad usage."""
    parser = argparse.ArgumentParser(prog="tp-invariant fingerprint", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="whose kernels (default: cuda where there is a GPU)")
    parser.add_argument(
        "--model", choices=("tensor-core",), help="compute the 16-bit GEMM lines of a Hopper GPU, on the CPU"
    )
    parser.add_argument("--output", metavar="FILE", help="write the lines there instead of printing them")
    parser.add_argument("--compare", metavar="FILE", help="compare with a file written before, instead of printing")
    options = parser.parse_args(list(argv))
    device = options.device or ("cuda" if torch.cuda.is_available() and not options.model else "cpu")
    if options.model and device == "cuda":
        parser.error("--model runs on the CPU: leave --device out")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu, or --model tensor-core, needs none")
    try:
        theirs = read_lines(options.compare) if options.compare else {}
        lines = tensor_core_fingerprint() if options.model else fingerprint(device)
        text = "\n".join([*header(device, options.model), *map(str, lines)]) + "\n"
        if options.output:
            Path(options.output).write_text(text)
    except (OSError, FileFormatError) as error:
        parser.error(str(error))
    if options.compare:
        return compare(lines, theirs, options.compare)
    if not options.output:
        sys.stdout.write(text)
    return 0
