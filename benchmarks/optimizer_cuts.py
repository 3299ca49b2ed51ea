"""Which of torch's optimizers step an element alike wherever the parameter that holds it is cut.

python benchmarks/optimizer_cuts.py > docs/optimizers.md      # half a minute on one core; `--device cuda` on a GPU
"""

from __future__ import annotations

import argparse
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
    for optimizer in OPTIMIZERS:
        cells = [cell(optimizer, i, dtype) if has(optimizer, i, device) else "" for dtype, i in columns]
        lines.append(f"| {optimizer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--cuts", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted: dict[int, Callable[[str, str, torch.dtype], str]] = {
        multiple: lambda optimizer, implementation, dtype, multiple=multiple: str(
            len(
                different_cuts(
                    optimizer,
                    implementation,
                    dtype,
                    seeds=options.seeds,
                    count=options.cuts,
                    multiple=multiple,
                    device=options.device,
                )
            )
        )
        for multiple in (1, ALIGNED)
    }
    where = torch.cuda.get_device_name() if options.device == "cuda" else torch.backends.cpu.get_cpu_capability()
    print(
        PAGE.format(
            total=options.seeds * options.cuts,
            steps=STEPS,
            size=SIZE,
            aligned=ALIGNED,
            versions=f"torch {torch.__version__}, Python {platform.python_version()}, {where}",
            anywhere=table(counted[1], options.device),
            multiples=table(counted[ALIGNED], options.device),
        )
    )


PAGE = """# Optimizers, and where a parameter is cut

Tensor parallelism cuts parameters. After a step they have the bits of TP=1 only if the optimizer steps an element alike
wherever the parameter that holds it is cut. Of torch's optimizers, on a CPU:

- **In float32 the for-loop and foreach implementations hold at every cut**, which is what `torch.optim` takes by
  default on a CPU. So 32-bit parameters, or 32-bit master weights of 16-bit ones, need nothing.
- **`fused=True` on a CPU does not hold** for SGD with momentum and for Adam and its kin: it computes whole vectors and
  what is left over by code that rounds differently.
- **In bfloat16 and float16 it depends on the optimizer, and is promised for none.** SGD, with momentum or without,
  centered RMSprop and the for-loop form of ASGD differ at most cuts, Adam with weight decay and the fused form of
  Adagrad at some. torch's loops over whole vectors round a product
  and a sum once, and its loops over what is left round each. Where the table has a 0 no difference was seen, which is
  less than a promise: other values, or another CPU, may show one.
- **Where every cut is at a multiple of {aligned} elements nothing is left over, and every entry holds**, fused ones
  too. Let a parameter's number of elements on each rank be a multiple of {aligned}, which local sizes that are
  multiples of {aligned} give. This is for one thread in each rank (`OMP_NUM_THREADS=1`, which torchrun sets): torch
  cuts what has more than 32768 elements once more, between its threads.
- `ATEN_CPU_CAPABILITY=default` in the environment of every rank makes torch round each operation by itself everywhere:
  for-loop and foreach then hold at every cut in 16 bits too, more slowly. It is another reference, with other bits.
- **The first step finds out.** With the mode on, an optimizer whose shards have other numbers of elements than
  multiples of {aligned} is tried, with its own options, on a small parameter and on parts of it, in about 20 ms:
  where a part differs, the step is an error. Several threads are not tried.
- **So it does for what computes with several elements of a parameter.** With the mode on, every optimizer of plain
  shards, yours and other packages' too, is tried in the same way, in about 20 ms for each kind of shard: one that takes
  norms (LAMB, LARS), keeps statistics of blocks (8-bit states), multiplies matrices (Shampoo, SOAP) or draws random
  numbers is refused before it changes anything. One that cannot be tried alone, such as an optimizer around another, is
  named by a warning in the log. `takes_shards = True` of an optimizer says that it knows of shards, or that where the
  shards are cut it is right.
- **Optimizers that need whole parameters are refused on plain shards**, by name, before they change anything: Muon,
  Adafactor, LBFGS, Shampoo, SOAP, LAMB and LARS. On DTensors torch's Muon and LBFGS have right values, and bits that
  depend on the degree; torch's Adafactor and the fused form of SGD raise.
- **`tp_invariant.optim.Muon`** computes from whole matrices, on DTensors and on plain shards, with the same bits at
  every degree. Each matrix is sent whole to one rank, which returns the parts. A weight that says that it is stacked
  (`partition_stride`, `partition_sizes`) is taken as its pieces, unless `split_stacked=False`.
- **`tp_invariant.optim.GradScaler`** is torch's, and its ranks agree on whether a step is skipped. torch's own is right
  on DTensors, and refused on plain shards.
- **torch's clip_grad_norm_** is right on DTensors, with bits that depend on the degree. On plain shards it scales by
  another norm on each rank: with the mode on, the first step of each optimizer compares the gradients of the layers'
  replicated parameters between the ranks of their `tp_group`, and raises. A parameter that is meant to differ says so
  by `parameter.tp_group = None`. Clipping that begins to scale later is seen with `TP_INVARIANT_CHECK=1` alone. Use
  `tp_invariant.clip_grad_norm_`, which has the same bits at every degree on both.
- **An optimizer of your own** that is named like one that is refused, such as a Muon which knows of shards, is taken
  if it has the attribute `takes_shards = True`, and is not tried.

On a GPU (an H200, torch 2.11) every entry holds at every cut but one: Adam with weight decay and `fused=True`, in
float32, where 21 of 48 cuts differed; AdamW's fused form holds. At multiples of {aligned} elements all hold.
`tests/test_optimizers.py` checks every entry there.

## Seen

How many of {total} random cuts of a parameter of {size} elements differ from the uncut one after {steps} steps; empty
where torch has no such implementation. {versions}. This writes the page anew:

    python benchmarks/optimizer_cuts.py > docs/optimizers.md

{anywhere}

The same where every cut is at a multiple of {aligned} elements:

{multiples}"""


if __name__ == "__main__":
    main()
