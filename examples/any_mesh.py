"""Trains one small model in many layouts of the same ranks, and compares every bit.

    python examples/any_mesh.py                          # a few layouts, two to three minutes on two cores
    python examples/any_mesh.py --all --model moe        # all 20 factorisations of 8 into pp, dp, cp, tp
    python examples/any_mesh.py --off                    # the control: the mode is off, and layouts differ
    python examples/any_mesh.py --picture any_mesh.png
    python examples/any_mesh.py --all --ranks 4 --device cuda --dtype bfloat16   # on four GPUs

A layout says how many pipeline stages (pp), data-parallel replicas (dp), parts of each sequence (cp) and
tensor-parallel ranks (tp) there are. "sp" is sequence parallelism; "ep" divides a mixture's experts over the data- and
tensor-parallel ranks; without it each replica has all of them. Each layout starts from the same seed and takes the same
steps on real text. Its digest is of the last loss, the last norm of the gradients, and all parameters. One run stops
after half of its steps and goes on in another layout. The last line is `one digest in N layouts: HEX`, or says which
differ (exit status 1).

Read `train` for what a training loop looks like at any layout. Needs transformers: pip install 'tp_invariant[hf]'.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import tp_invariant as tpi
from tp_invariant.examples.words import TEXT
from tp_invariant.testing import digest, run_ranks

LENGTH = 64
SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8, head_dim=8,
    max_position_embeddings=LENGTH, tie_word_embeddings=True, use_cache=False, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


class Layout(NamedTuple):
    pp: int
    dp: int
    cp: int
    tp: int
    extra: str = ""  # "sp" or "ep"

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in zip(self._fields, self[:4], strict=False)) + (
            f" {self.extra}" if self.extra else ""
        )


def every_layout(ranks: int) -> Iterator[Layout]:
    """All ways to write `ranks` as pp x dp x cp x tp."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp in divisors:
        for dp in divisors:
            for cp in divisors:
                if ranks % (pp * dp * cp) == 0:
                    yield Layout(pp, dp, cp, ranks // (pp * dp * cp))


FEW = (
    Layout(1, 1, 1, 8, "sp"),
    Layout(1, 2, 2, 2),
    Layout(1, 2, 1, 4, "sp"),
    Layout(2, 1, 2, 2, "sp"),
    Layout(2, 1, 1, 4),
    Layout(2, 2, 2, 1),
)


# --- training, on every rank ----------------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> Any:
    """The same whole model on every rank."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": options.parts}
    config = Qwen3Config(**sizes) if options.model == "dense" else Qwen3MoeConfig(**sizes, **EXPERTS)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).to(options.device)


def micro_batch(number: int, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and targets, int64 [1, LENGTH] each: a window of the text's bytes."""
    text = torch.tensor(list(TEXT.encode()), device=device)
    start = number * 37 % (len(text) - LENGTH - 1)
    window = text[start : start + LENGTH + 1]
    return window[None, :-1], window[None, 1:]


class Record(NamedTuple):
    losses: list[float]
    digest: str
    seconds: float


def train(
    world: Any, layout: Layout, options: argparse.Namespace, steps: range, load: str | None, save: str | None
) -> Record:
    """Takes `steps` in a layout, from the seed or from the checkpoint `load`; writes the checkpoint `save`."""
    began = time.perf_counter()
    with tpi.set_tp_invariant_mode(not options.off):
        mesh = init_device_mesh(options.device, layout[:4], mesh_dim_names=layout._fields[:4])
        # also without "ep" by expert: the norm of the gradients is summed expert by expert then
        over = mesh["dp", "tp"] if layout.extra == "ep" else mesh["tp"]
        experts = {"expert_parallel_group": over} if options.model == "moe" else {}
        model = tpi.parallelize(
            build(options), mesh=mesh, sequence_chunks=options.parts, sequence_parallel=layout.extra == "sp", **experts
        )
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=options.micro_batches)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
        if load is not None:
            tpi.checkpoint.load(load, model, optimizer, group=world, pp_group=mesh["pp"])
        run = pipeline if layout.pp > 1 else one_stage
        log = []
        for step in steps:
            numbers = [step * options.micro_batches + number for number in tree.share]
            batches = [micro_batch(number, options.device) for number in numbers]
            parts = [tuple(tpi.sequence_part(x, mesh["cp"]) for x in batch) for batch in batches]
            losses = run(model, mesh, tree, parts)
            tree.reduce()
            norm = tpi.clip_grad_norm_(model.parameters(), 1.0, pp_group=mesh["pp"])
            optimizer.step()
            optimizer.zero_grad()
            log.append((sum(gathered(losses, mesh)) / (options.micro_batches * LENGTH), norm))
        if save is not None:
            tpi.checkpoint.save(save, model, optimizer, group=world, pp_group=mesh["pp"])
        weights = tpi.full_state_dict(model, pp_group=mesh["pp"])
        return Record([loss for loss, _ in log], digest([log[-1], weights]), time.perf_counter() - began)


def one_stage(model: Any, mesh: Any, tree: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for ids, targets in batches:
        loss = loss_of(model(ids).logits, targets, cp=mesh["cp"])
        loss.backward()
        tree.add(count=LENGTH)
        losses.append(loss.item())
    return losses


def pipeline(model: Any, mesh: Any, tree: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    counts, losses = [LENGTH] * len(batches), list[Tensor]()
    stage = tpi.data_parallel.Stage(model, mesh["pp"], batches[0][0].device, tree=tree, counts=counts)
    schedule = Schedule1F1B(stage, len(batches), loss_fn=functools.partial(loss_of, cp=mesh["cp"]))
    ids, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    if stage.is_last:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step(*([ids] if stage.is_first else []))
    return [loss.item() for loss in losses]


def loss_of(logits: Tensor, targets: Tensor, cp: Any) -> Tensor:
    """The sum over the tokens of whole sequences."""
    losses = tpi.vocab_parallel_cross_entropy(logits, targets, tp_group=None, reduction="none")
    return tpi.regions.gather_sequence(losses, cp, 1).sum()


def gathered(losses: list[float], mesh: Any) -> list[float]:
    """Those of all micro-batches, in order: the last stage has them."""
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, losses)
    last = mesh.mesh[-1, :, 0, 0].tolist()  # of each replica
    return [loss for rank in last for loss in everyone[rank]]


# --- the table ------------------------------------------------------------------------------------------------------


def run(layout: Layout, options: argparse.Namespace, **others: Any) -> Record:
    """The record of a layout, which is the same on every rank."""
    given = {"steps": range(options.steps), "load": None, "save": None, **others}
    records = run_ranks(train, options.ranks, layout, options, *given.values(), device=options.device, timeout=1800)
    if len({record.digest for record in records}) > 1:
        raise RuntimeError(f"{layout}: ranks have different digests")
    return records[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--all", action="store_true", help="all factorisations, with and without sp, or ep")
    parser.add_argument("--ranks", type=int, default=8, help="with --all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, one rank on each GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--off", action="store_true", help="the control: with the mode off")
    parser.add_argument("--picture", help="draw the losses to this file, with the mode on and off")
    options = parser.parse_args(argv)
    if options.steps < 2 or options.ranks < 1:
        parser.error("at least two steps, one before the stop and one after it, and one rank")
    if options.ranks != 8 and not options.all:
        parser.error("the chosen few layouts are of 8 ranks: --ranks needs --all")
    # layers, and chunks of a sequence: as many as ranks share them at most; 1F1B needs a micro-batch for each stage
    options.parts, options.micro_batches = (options.ranks, options.ranks) if options.all else (2, 4)
    layouts = list(every_layout(options.ranks) if options.all else FEW)
    extra, dim = ("sp", "tp") if options.model == "dense" else ("ep", "dp")
    if options.all:
        layouts += [layout._replace(extra=extra) for layout in layouts if getattr(layout, dim) > 1]
    elif options.model == "moe":
        layouts = [layout._replace(extra="ep" if layout.dp > 1 else "") for layout in layouts]
    found: dict[str, Record] = {}
    for layout in layouts:
        found[str(layout)] = record = run(layout, options)
        print(
            f"{layout!s:24} loss {record.losses[-1]:.9f}  digest {record.digest[:12]}  {record.seconds:.0f} s",
            flush=True,
        )
    first, last, half = layouts[0], layouts[-1], options.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        run(first, options, steps=range(half), save=folder)
        resumed = run(last, options, steps=range(half, options.steps), load=folder)
    name = f"{half} steps of {first}, then {last}"
    found[name] = resumed
    print(f"{name}: loss {resumed.losses[-1]:.9f}  digest {resumed.digest[:12]}", flush=True)
    if options.picture:
        off = argparse.Namespace(**{**vars(options), "off": True})
        draw(options.picture, {"mode on": found, "mode off": {str(x): run(x, off) for x in layouts}})
    digests = {record.digest for record in found.values()}
    if len(digests) == 1:
        print(f"one digest in {len(layouts)} layouts: {digests.pop()}")
        return 0
    expected = found[str(first)].digest
    print(f"differ from {first}: {', '.join(name for name, record in found.items() if record.digest != expected)}")
    return 1


def draw(file: str, found: dict[str, dict[str, Record]]) -> None:
    """How far each layout's loss is from the first one's, step by step, for each mode."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(9, 3.5), sharey=True, layout="constrained")
    for axes, (title, of_layout) in zip(panels, found.items(), strict=True):
        first, *others = of_layout
        losses = of_layout[first].losses
        for name in others:
            own = of_layout[name].losses
            begin = len(losses) - len(own)
            distances = [abs(a - b) for a, b in zip(own, losses[begin:], strict=True)]
            axes.plot(range(begin + 1, len(losses) + 1), distances, label=name)
        axes.set(title=title, xlabel="step", ylabel=f"distance from the loss of {first}")
        axes.set_yscale("symlog", linthresh=1e-8)
    panels[-1].legend(fontsize="x-small")
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
