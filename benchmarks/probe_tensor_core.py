"""Asks a GPU which recipe its tensor core follows: python benchmarks/probe_tensor_core.py

For each class of data in tests/helpers/tensor_core_data.py the GPU's fp32 sums are compared, byte for byte, with those
of the CPU model (kernels/gemm/tensor_core.py) and of its alternatives, one change each. Where the model's own recipe
does not give every element, the mismatches are sorted by kind, and all combinations of the alternatives are tried on a
part of them. The last lines say what to believe. Exit status 1 if the model is wrong anywhere. Takes about a minute,
and some more for each class that the model gets wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from tensor_core_data import ALTERNATIVES, CASES, gpu_kernels, mismatches, operands

from tp_invariant.kernels.gemm.tensor_core import HOPPER, Recipe, matmul, model

M, N, K = 96, 128, 256
PART_M, PART_N = 24, 32  # of those, for all combinations


def combinations() -> Iterator[Recipe]:
    """Every recipe that mixes the values of the alternatives, those near Hopper's first."""
    fields = [field.name for field in dataclasses.fields(Recipe)]
    values = [
        list(dict.fromkeys([getattr(HOPPER, name), *(getattr(r, name) for r in ALTERNATIVES.values())]))
        for name in fields
    ]
    recipes = [Recipe(**dict(zip(fields, mix, strict=True))) for mix in itertools.product(*values)]
    yield from sorted(recipes, key=lambda r: len(changes(r)))


def changes(recipe: Recipe) -> dict[str, object]:
    mine = dataclasses.asdict(recipe)
    return {name: mine[name] for name, value in dataclasses.asdict(HOPPER).items() if mine[name] != value}


def nan_patterns(c: Tensor) -> set[str]:
    bits = c.view(torch.int32 if c.element_size() == 4 else torch.int16)[c.isnan()]
    return {hex(b & (0xFFFFFFFF if c.element_size() == 4 else 0xFFFF)) for b in bits.unique().tolist()}


def share(got: Tensor, want: Tensor) -> str:
    wrong, total = mismatches(got, want, 0)[0], got.numel()
    return "all" if not wrong else f"{100 * (total - wrong) / total:.2f}%"


def probe_case(
    name: str, dtype: torch.dtype, kernels: dict[str, Callable[..., Tensor]], device: str
) -> tuple[bool, set[str]]:
    """Prints what one class of data says; whether the model is right, and which of the alternatives agree too."""
    a, b = operands(name, M, N, K, dtype)
    found = {kernel: fn(a.to(device), b.to(device), out_dtype=torch.float32).cpu() for kernel, fn in kernels.items()}
    got = found["bundled"]
    want = matmul(a, b, out_dtype=torch.float32)
    right = not mismatches(got, want)[0]
    agree = {}
    for label, recipe in ALTERNATIVES.items():
        agree[label] = share(got, model(a, b, None, torch.float32, recipe))
    tell = ", ".join(f"{label} {text}" for label, text in agree.items() if text != "all")
    print(f"{name}, {dtype}: model {share(got, want)}; refuted: {tell or 'none'}")
    for kernel, other in found.items():
        if mismatches(other, got)[0]:
            print(f"  {kernel} gives other bits than bundled:\n{mismatches(other, got)[1]}")
            right = False
    half = kernels["bundled"](a.to(device), b.to(device)).cpu()
    for what, c, model_c in (("fp32", got, want), (f"{dtype}", half, matmul(a, b))):
        if nan_patterns(c) != nan_patterns(model_c):
            print(f"  NaNs in {what}: {sorted(nan_patterns(c))}, in the model {sorted(nan_patterns(model_c))}")
        count, text = mismatches(c, model_c)
        if count:
            right = False
            print(f"  {what} output, {count} of {c.numel()} elements differ:\n    " + text.replace("\n", "\n    "))
    if mismatches(got, want)[0]:
        part_a, part_b, part = a[:PART_M], b[:, :PART_N], got[:PART_M, :PART_N]
        fits = (r for r in combinations() if not mismatches(part, model(part_a, part_b, None, torch.float32, r))[0])
        best = list(itertools.islice(fits, 3))
        print("  recipes that give every element of a part: " + ("; ".join(str(changes(r)) for r in best) or "none"))
    return right, {label for label, text in agree.items() if text == "all"}


def probe(kernels: dict[str, Callable[..., Tensor]], device: str, cases: list[tuple[str, torch.dtype]]) -> int:
    """How many cases the model gets wrong; prints each and a verdict."""
    wrong, open_alternatives = [], set(ALTERNATIVES)
    for name, dtype in cases:
        right, agree = probe_case(name, dtype, kernels, device)
        open_alternatives &= agree
        if not right:
            wrong.append(f"{name} {dtype}")
    print(f"\nThe model gives every bit of {len(cases) - len(wrong)} of {len(cases)} cases.")
    if wrong:
        print(f"Wrong: {', '.join(wrong)}")
    print(f"Alternatives that no case refutes: {', '.join(sorted(open_alternatives)) or 'none'}")
    return len(wrong)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if not torch.cuda.is_available():
        print("this probe needs a CUDA GPU with bfloat16 tensor cores", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {M} x {N} x {K}")
    return 1 if probe(gpu_kernels(), "cuda", CASES) else 0


if __name__ == "__main__":
    raise SystemExit(main())
