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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
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
    x = torch.arange(count, dtype=torch.int64, device="cpu") * 0x1E3779B9 + zlib.crc32(name.encode()) & 0xFFFFFFFF
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


def _operands(at: str, dtype: torch.dtype, device: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Two functions of an operand's name and sizes.

    The first one's data has so many exponents that sums depend on their order, but stay within the dtype's range.
    """

    def operand(exponents: tuple[int, int], name: str, *shape: int) -> Tensor:
        return hashed_floats(f"{at} {name}", shape, dtype, exponents).to(device)

    return partial(operand, (-4, 4) if dtype == torch.float16 else (-8, 8)), partial(operand, (-4, 4))


# --- results --------------------------------------------------------------------------------------------------------


def _lines(dtype: torch.dtype, shape: tuple[int, ...], results: dict[str, Tensor]) -> list[Line]:
    return [Line(name, dtype, shape, digest(value)) for name, value in results.items()]


def gemm_lines(gemm_fn: GemmFn, dtypes: Sequence[torch.dtype], device: str) -> Iterator[Line]:
    """The three layouts of a linear layer's products, bias, and fp32 output, in a fixed order."""
    for dtype, (m, n, k) in product(dtypes, GEMM_SHAPES):
        wide, _ = _operands(f"{m}x{n}x{k}", dtype, device)
        x, weight, dyt, xt = wide("x", m, k), wide("weight", n, k).t(), wide("dyt", k, m).t(), wide("xt", k, n)
        results = {
            "gemm.forward": gemm_fn(x, weight),
            "gemm.forward+bias": gemm_fn(x, weight, bias=wide("bias", n)),
            "gemm.dgrad": gemm_fn(wide("dy", m, k), wide("w", k, n)),
            "gemm.wgrad": gemm_fn(dyt, xt),
        }
        if dtype != torch.float32:  # of which it is the line before
            results["gemm.wgrad.float32"] = gemm_fn(dyt, xt, out_dtype=torch.float32)
        yield from _lines(dtype, (m, n, k), results)


def norm_lines(device: str) -> Iterator[Line]:
    """LayerNorm and RMSNorm, forward and backward."""
    for name, dtype, (rows, features) in product(("layernorm", "rmsnorm"), BUNDLED_DTYPES, ROW_SHAPES):
        wide, _ = _operands(f"{rows}x{features}", dtype, device)
        inputs = {"dx": wide("x", rows, features), "dweight": wide("weight", features)}
        if name == "layernorm":
            inputs["dbias"] = wide("bias", features)
        call = NormCall(resolve_group(None), TokenSharding(1, 0), 1e-5, name == "rmsnorm", False)
        x, weight, bias = (*(t.requires_grad_() for t in inputs.values()), None)[:3]
        y = Norm.apply(x, weight, bias, call)
        grads = torch.autograd.grad(y, list(inputs.values()), wide("dy", rows, features))
        results = {"y": y, **dict(zip(inputs, grads, strict=True))}
        yield from _lines(dtype, (rows, features), {f"{name}.{result}": value for result, value in results.items()})


def loss_lines(device: str) -> Iterator[Line]:
    """Cross-entropy with label smoothing, forward and backward."""
    for dtype, (rows, vocab) in product(BUNDLED_DTYPES, ROW_SHAPES):
        at = f"{rows}x{vocab}"
        logits = _operands(at, dtype, device)[1]("logits", rows, vocab).requires_grad_()
        target = (hashed(f"{at} target", rows) % vocab).to(device)
        with set_tp_invariant_mode(True):
            loss = vocab_parallel_cross_entropy(logits, target, tp_group=None, label_smoothing=0.125, reduction="none")
        dloss = _operands(at, torch.float32, device)[1]("dloss", rows).to(loss.dtype)
        (dlogits,) = torch.autograd.grad(loss, logits, dloss)
        yield from _lines(dtype, (rows, vocab), {"cross_entropy.loss": loss, "cross_entropy.dlogits": dlogits})


def attention_lines(device: str) -> Iterator[Line]:
    """Four query heads on two key heads: causal and within a window, forward and backward, and one query of a decoder.

    The problem's shape is query heads x key heads x queries x keys x head size.
    """
    names = ("attention", "attention.window", "attention.decode")
    for dtype, (tokens, head_dim), name in product(BUNDLED_DTYPES, ATTENTION_SHAPES, names):
        queries, keys = (1, 8 * tokens) if name == "attention.decode" else (tokens, tokens)
        at = f"{name} {queries}x{keys}x{head_dim}"
        shapes = {"q": (1, 4, queries, head_dim), "k": (1, 2, keys, head_dim), "v": (1, 2, keys, head_dim)}
        inputs = [
            hashed_floats(f"{at} {operand}", shape, dtype, (-4, 0)).to(device).requires_grad_()
            for operand, shape in shapes.items()
        ]
        out = attention(*inputs, causal=True, window=tokens // 4 if name == "attention.window" else None)
        results = {f"{name}.out": out}
        if queries > 1:
            grads = torch.autograd.grad(out, inputs, _operands(at, dtype, device)[0]("dout", *out.shape))
            results |= {f"{name}.d{operand}": grad for operand, grad in zip(shapes, grads, strict=True)}
        yield from _lines(dtype, (4, 2, queries, keys, head_dim), results)


def row_lines(device: str) -> Iterator[Line]:
    """Softmax, log-softmax and sums of rows, and the gradient of an embedding whose ids repeat."""
    embedding, softmax = select("embedding gradient", device), select("softmax", device)
    for dtype, (rows, features) in product(BUNDLED_DTYPES, ROW_SHAPES):
        at = f"{rows}x{features}"
        wide, narrow = _operands(at, dtype, device)
        logits, dy = narrow("logits", rows, features), wide("dy", rows, features)
        results = {
            "softmax": softmax.softmax(logits, log=False, out_dtype=dtype),
            "log_softmax": softmax.softmax(logits, log=True, out_dtype=dtype),
            "row_sums": softmax.row_sums(dy, divisor=1, out_dtype=dtype),
            "embedding.dweight": embedding.embedding_grad(dy, (hashed(f"{at} ids", rows) % 3 * 2).to(device), 4, dtype),
        }
        yield from _lines(dtype, (rows, features), results)


def fingerprint(device: str) -> list[Line]:
    """Every line of the kernels bundled for `device`, always in the same order."""
    gemms = gemm_lines(bundled_gemm_fn(torch.device(device)), BUNDLED_DTYPES, device)
    others = (norm_lines, loss_lines, attention_lines, row_lines)
    return [*gemms, *(line for lines in others for line in lines(device))]


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
