"""Digests of what the bundled kernels compute on fixed inputs: one line of text for each result, to compare machines.

    tp-invariant fingerprint --output here.txt                          on one machine
    tp-invariant fingerprint --compare here.txt                         on another, or with another version
    tp-invariant fingerprint --model tensor-core --compare gpu.txt      on a CPU: did that GPU do what a Hopper does?

A line is `result dtype shape digest`; lines that start with # name the versions and the device. The inputs are the same
everywhere: hashes of a name and an index, without a random number generator or rounding. So equal digests mean equal
bits.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..comm.collectives import resolve_group
from ..consistency.environment import architecture, installed
from ..core.bits import digest
from ..core.layout import TokenSharding
from ..core.mode import set_tp_invariant_mode
from ..functional.attention import attention
from ..functional.cross_entropy import vocab_parallel_cross_entropy
from ..functional.norm import Norm, NormCall
from ..gemm.gemm_fn import BUNDLED_DTYPES, GemmFn, bundled_gemm_fn
from ..kernels.dtypes import HALF_DTYPES
from ..kernels.select import select
from ..version import __version__

GEMM_SHAPES = ((96, 160, 1000), (33, 65, 257), (32, 48, 4096))  # M, N, K
ROW_SHAPES = ((96, 1000), (33, 257), (10, 4096))  # tokens, features
ATTENTION_SHAPES = ((150, 64), (70, 40))  # tokens, head size


@dataclass(frozen=True)
class Line:
    """One result: `name` is what was computed, `shape` that of the problem, not of the result."""

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
    """`count` 32-bit hashes, as int64, that depend only on the name and their index.

    Two rounds of xor-shift and multiply, as in MurmurHash3's last step; the factors are below 2^31, so that no product
    passes 2^63.
    """
    x = torch.arange(count, dtype=torch.int64) * 0x1E3779B9 + zlib.crc32(name.encode()) & 0xFFFFFFFF
    for factor, shift in ((0x21F0AAAD, 16), (0x735A2D97, 15)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x ^ x >> 15


def hashed_floats(name: str, shape: tuple[int, ...], dtype: torch.dtype, exponents: tuple[int, int]) -> Tensor:
    """Normal numbers with hashed signs, fractions, and exponents in [low, high); high - low is a power of two.

    dtype is bfloat16, float16 or float32.
    """
    digits, bias, bits = {
        torch.bfloat16: (7, 127, torch.int16),
        torch.float16: (10, 15, torch.int16),
        torch.float32: (23, 127, torch.int32),
    }[dtype]
    low, high = exponents
    x = hashed(name, math.prod(shape))
    field = (x >> 23 & high - low - 1) + low + bias  # the fraction has the bits below, the sign the highest
    magnitude = field << digits | x & (1 << digits) - 1
    return (magnitude - (x >> 31 << 8 * dtype.itemsize - 1)).to(bits).view(dtype).view(shape)


def _wide(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Data with so many exponents that sums depend on their order, but stay within the dtype's range."""
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
                if name != "gemm.wgrad.float32" or dtype != torch.float32:  # the line before is the same
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


def attention_lines(dtypes: Sequence[torch.dtype], device: str) -> Iterator[Line]:
    """Four query heads on two key heads: causal and within a window, forward and backward, and one query of a decoder.

    The problem's shape is query heads x key heads x queries x keys x head size.
    """
    for dtype in dtypes:
        for tokens, head_dim in ATTENTION_SHAPES:
            for name, queries, keys, window in (
                ("attention", tokens, tokens, None),
                ("attention.window", tokens, tokens, tokens // 4),
                ("attention.decode", 1, 8 * tokens, None),
            ):
                at = f"{name} {queries}x{keys}x{head_dim}"
                q, k, v = (
                    hashed_floats(f"{at} {operand}", (1, heads, length, head_dim), dtype, (-4, 0)).to(device)
                    for operand, heads, length in (("q", 4, queries), ("k", 2, keys), ("v", 2, keys))
                )
                inputs = {f"d{operand}": x.requires_grad_() for operand, x in (("q", q), ("k", k), ("v", v))}
                out = attention(*inputs.values(), causal=True, window=window)
                results = {"out": out}
                if queries > 1:
                    dout = _wide(f"{at} dout", tuple(out.shape), dtype).to(device)
                    grads = torch.autograd.grad(out, list(inputs.values()), dout)
                    results |= dict(zip(inputs, grads, strict=True))
                for result, value in results.items():
                    yield Line(f"{name}.{result}", dtype, (4, 2, queries, keys, head_dim), digest(value))


def row_lines(dtypes: Sequence[torch.dtype], device: str) -> Iterator[Line]:
    """Softmax, log-softmax and sums of rows, and the gradient of an embedding whose ids repeat."""
    embedding, softmax = select("embedding gradient", device), select("softmax", device)
    for dtype in dtypes:
        for rows, features in ROW_SHAPES:
            at = f"{rows}x{features}"
            logits = hashed_floats(f"{at} logits", (rows, features), dtype, (-4, 4)).to(device)
            dy = _wide(f"{at} dy", (rows, features), dtype).to(device)
            ids = (hashed(f"{at} ids", rows) % 3 * 2).to(device)
            results = {
                "softmax": softmax.softmax(logits, log=False, out_dtype=dtype),
                "log_softmax": softmax.softmax(logits, log=True, out_dtype=dtype),
                "row_sums": softmax.row_sums(dy, divisor=1, out_dtype=dtype),
                "embedding.dweight": embedding.embedding_grad(dy, ids, 4, dtype),
            }
            for name, value in results.items():
                yield Line(name, dtype, (rows, features), digest(value))


def fingerprint(device: str) -> list[Line]:
    """Every line of the kernels bundled for `device`, always in the same order."""
    return [
        *gemm_lines(bundled_gemm_fn(torch.device(device)), BUNDLED_DTYPES, device),
        *norm_lines(BUNDLED_DTYPES, device),
        *loss_lines(BUNDLED_DTYPES, device),
        *attention_lines(BUNDLED_DTYPES, device),
        *row_lines(BUNDLED_DTYPES, device),
    ]


def tensor_core_fingerprint() -> list[Line]:
    """The lines that the tensor cores of a Hopper GPU decide, as its CPU model computes them: 16-bit GEMMs."""
    from ..kernels.gemm.tensor_core import matmul

    return list(gemm_lines(matmul, HALF_DTYPES, "cpu"))


def is_predicted(key: str) -> bool:
    """Whether the CPU model of the tensor core computes the line with this key."""
    name, dtype, _ = key.split(" ")
    return name.startswith("gemm.") and f"torch.{dtype}" in map(str, HALF_DTYPES)


_MODEL = "the CPU model of Hopper's tensor core"


def header(device: str, model: str | None) -> list[str]:
    where = _MODEL if model else architecture(torch.device(device))
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()}, {where}"
    versions = ("tp_invariant", __version__), ("torch", torch.__version__), ("triton", installed("triton") or "none")
    return [*(f"# {package} {version}" for package, version in versions), f"# {where}"]


# --- the command ----------------------------------------------------------------------------------------------------


_LINE = re.compile(r"\S+ \w+ [0-9x]+ [0-9a-f]{64}")


def read_lines(path: str) -> dict[str, str]:
    """{"result dtype shape": digest} of a file that this command wrote.

    Raises:
        ValueError: a line of another form, or no line at all.
    """
    digests: dict[str, str] = {}
    for number, text in enumerate(Path(path).read_text(errors="replace").splitlines(), 1):
        if text.startswith("#") or not text.strip():
            continue
        if _LINE.fullmatch(text) is None:
            raise ValueError(
                f"{path}, line {number}: {text[:80]!r} ({len(text):,} characters) is not a line of a fingerprint, "
                "which is: result dtype shape digest"
            )
        key, _, digest = text.rpartition(" ")
        digests[key] = digest
    if not digests:
        raise ValueError(f"{path} holds no line of a fingerprint, so there is nothing to compare with")
    return digests


def compare(lines: Sequence[Line], theirs: dict[str, str], path: str, predicted: bool = False) -> int:
    """Prints the differences from the file's lines; 0 if both have the same lines, 1 if not or if there are none.

    predicted: the lines of one side come from the CPU model, so results that it does not compute are left out.
    """
    ours = {line.key: line.digest for line in lines}
    left_out = {key for key in ours | theirs if predicted and not is_predicted(key)}
    shared = [key for key in ours if key in theirs and key not in left_out]
    differ = [key for key in shared if ours[key] != theirs[key]]
    here, there = (sorted(one.keys() - other.keys() - left_out) for one, other in ((ours, theirs), (theirs, ours)))
    for key in differ:
        print(f"differs: {key}: {ours[key]} here, {theirs[key]} in {path}")
    for where, keys in (("here", here), (f"in {path}", there)):
        if keys:
            print(f"only {where}: {', '.join(dict.fromkeys(key.split(' ')[0] for key in keys))}")
    count = f"{len(shared) - len(differ)} of {len(shared)} results are the same bits as in {path}"
    print(
        count if shared else f"nothing was compared: no result is both here and in {path}",
        f"; {len(here)} are only here and {len(there)} only there",
        f"; {len(left_out)} that the model does not predict are left out" if left_out else "",
        sep="",
    )
    return 1 if differ or here or there or not shared else 0


def main(argv: Sequence[str]) -> int:
    """The `fingerprint` command; exit statuses as its help says."""
    parser = argparse.ArgumentParser(
        prog="tp-invariant fingerprint",
        description=__doc__.splitlines()[0],
        epilog="Exit status: 0; with --compare 1 if a result differs, is on one side only, or if there is none (if one "
        "side was written with --model, among the results that the model predicts); 2 for a wrong option.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="whose kernels run (default: cuda if there is a GPU)")
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
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.compare:
        predicted = f"# {_MODEL}" in Path(options.compare).read_text(errors="replace").splitlines()
        return compare(lines, theirs, options.compare, bool(options.model) or predicted)
    if not options.output:
        sys.stdout.write(text)
    return 0
