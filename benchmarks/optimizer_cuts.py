"""Which of torch's optimizers step an element alike wherever the parameter that holds it is cut.

python benchmarks/optimizer_cuts.py      # half a minute on one core; `--device cuda` on a GPU

It prints the table of docs/optimizers.md, and fails where a cut at a multiple of 64 elements differs.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, optim

from tp_invariant.core.bits import raw_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": dict(foreach=False),
    "foreach": dict(foreach=True),
    "fused": dict(fused=True),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", dict(lr=0.1)),
    "SGD, weight decay": ("SGD", dict(lr=0.1, weight_decay=0.1)),
    "SGD, momentum": ("SGD", dict(lr=0.1, momentum=0.9)),
    "SGD, Nesterov": ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "Adam": ("Adam", dict(lr=0.01, eps=1e-4)),
    "Adam, weight decay": ("Adam", dict(lr=0.01, eps=1e-4, weight_decay=0.1)),
    "Adam, amsgrad": ("Adam", dict(lr=0.01, eps=1e-4, amsgrad=True)),
    "AdamW": ("AdamW", dict(lr=0.01, eps=1e-4)),
    "NAdam": ("NAdam", dict(lr=0.01, eps=1e-4)),
    "RAdam": ("RAdam", dict(lr=0.01, eps=1e-4)),
    "Adamax": ("Adamax", dict(lr=0.01, eps=1e-4)),
    "Adagrad": ("Adagrad", dict(lr=0.01, eps=1e-4)),
    "Adadelta": ("Adadelta", dict(lr=1.0, eps=1e-4)),
    "RMSprop": ("RMSprop", dict(lr=0.01, eps=1e-4)),
    "RMSprop, centered, momentum": ("RMSprop", dict(lr=0.01, eps=1e-4, centered=True, momentum=0.9)),
    "ASGD": ("ASGD", dict(lr=0.1)),
    "Rprop": ("Rprop", dict(lr=0.01)),
}
SIZE = 960  # elements of the whole parameter, a multiple of ALIGNED
ALIGNED = 64  # two AVX-512 vectors of 16-bit elements
STEPS = 4


def has(optimizer: str, implementation: str, device: str = "cpu") -> bool:
    """Whether torch's optimizer has this implementation on this kind of device."""
    name = OPTIMIZERS[optimizer][0]
    if next(iter(IMPLEMENTATIONS[implementation])) not in inspect.signature(getattr(optim, name)).parameters:
        return False
    one = torch.ones(1, device=device)
    try:
        stepped(optimizer, implementation, one, [one], slice(None))
    except RuntimeError:  # fused Adagrad on CUDA, say
        return False
    return True


def stepped(optimizer: str, implementation: str, whole: Tensor, grads: list[Tensor], cut: slice) -> Tensor:
    """The elements `cut` of a parameter that holds these alone, after a step with each gradient."""
    name, options = OPTIMIZERS[optimizer]
    parameter = torch.nn.Parameter(whole[cut].clone())
    made = getattr(optim, name)([parameter], **options, **IMPLEMENTATIONS[implementation])
    for grad in grads:
        parameter.grad = grad[cut].clone()
        made.step()
    return parameter.detach()


def cuts(seed: int, count: int, multiple: int = 1) -> Iterator[slice]:
    """Random parts of SIZE elements that begin and end at multiples of `multiple`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ends = torch.randperm(SIZE // multiple + 1, generator=generator)[:2].sort().values * multiple
        yield slice(int(ends[0]), int(ends[1]))


def different_cuts(
    optimizer: str,
    implementation: str,
    dtype: torch.dtype,
    *,
    seeds: int,
    count: int,
    multiple: int = 1,
    device: str = "cpu",
) -> list[slice]:
    """Of `seeds` times `count` cuts, those whose elements step otherwise than in the whole parameter."""
    different = []
    for seed in range(seeds):
        g = torch.Generator().manual_seed(seed)
        whole = torch.randn(SIZE, generator=g).to(device, dtype)
        scales = torch.exp2(torch.randint(-4, 3, (STEPS, SIZE), generator=g).float())
        grads = list((torch.randn(STEPS, SIZE, generator=g) * scales).to(device, dtype))
        expected = stepped(optimizer, implementation, whole, grads, slice(None))
        for cut in cuts(seed, count, multiple):
            got = stepped(optimizer, implementation, whole, grads, cut)
            if not torch.equal(raw_bytes(got), raw_bytes(expected[cut])):
                different.append(cut)
    return different


def table(cell: Callable[[str, str, torch.dtype], str], device: str) -> str:
    columns = list(itertools.product(DTYPES, IMPLEMENTATIONS))
    heads = [f"{str(dtype).removeprefix('torch.')}, {implementation}" for dtype, implementation in columns]
    lines = ["| optimizer | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    equal = []
    for optimizer in OPTIMIZERS:
        cells = [cell(optimizer, i, dtype) if has(optimizer, i, device) else "" for dtype, i in columns]
        if set(cells) <= {"0", ""}:
            equal.append(optimizer)
        else:
            lines.append(f"| {optimizer} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"No cut of {', '.join(equal)} differs."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--cuts", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.device == "cuda" else torch.backends.cpu.get_cpu_capability()

    def cell(optimizer: str, implementation: str, dtype: torch.dtype) -> str:
        trial = functools.partial(different_cuts, optimizer, implementation, dtype, device=options.device)
        aligned = trial(seeds=options.seeds, count=options.cuts, multiple=ALIGNED)
        assert not aligned, (optimizer, implementation, dtype, aligned)
        return str(len(trial(seeds=options.seeds, count=options.cuts)))

    print(
        f"How many of {options.seeds * options.cuts} random cuts of a parameter of {SIZE} elements differ from the "
        f"uncut one after {STEPS} steps;\nempty where torch has no such implementation. At multiples of {ALIGNED} "
        f"elements none differs.\ntorch {torch.__version__}, Python {platform.python_version()}, {where}.\n"
    )
    print(table(cell, options.device))


if __name__ == "__main__":
    main()
