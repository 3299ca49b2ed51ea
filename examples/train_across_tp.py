"""Trains one small transformer at several tensor-parallel degrees and compares every bit.

    python examples/train_across_tp.py            or: tp-invariant demo

Each degree starts from the same seed and reads the same text. After every step every rank takes a digest of the loss,
all gradients, their norm and all parameters. With the mode on the digests agree at every degree; with it off, the
negative control, they part.

Read `train` for what a training loop looks like, small_transformer.py for the model; demo_report.py draws the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tp_invariant as tpi
from tp_invariant.core.amx import avoid_trapped_units
from tp_invariant.core.processes import temporary_folder
from tp_invariant.diagnostics.doctor_facts import cpu_model
from tp_invariant.examples.demo_options import TrainConfig, check_options, make_parser
from tp_invariant.examples.demo_report import Runs, Step, Watch, print_table, save_picture, verdict
from tp_invariant.examples.small_transformer import Transformer
from tp_invariant.testing import RankError, digest, full_grads, full_parameters, run_ranks
from tp_invariant.testing.rank_pool import discard_pool

# --- training, on every rank ----------------------------------------------------------------------------------------


def train(tp_group: Any, config: TrainConfig, invariant: bool, progress_path: str | None) -> list[Step]:
    """Trains from scratch and returns this rank's record; rank 0 also writes each loss to progress_path."""
    with tpi.set_tp_invariant_mode(invariant):
        torch.manual_seed(config.seed)
        model = Transformer(config.model, tp_group)
        # one tensor at a time: elementwise steps whose bits do not depend on how tensors are grouped or cut
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, foreach=False)
        batches = Batches(config)
        record: list[Step] = []
        for _ in range(config.steps):
            tokens, targets = batches.next()
            logits = model(tokens)
            # float64, since a float32 loss near 3 moves in steps of 2e-7, too coarse to watch the mode off drift
            loss = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            tensors = {"loss": digest(loss)}
            tensors |= {f"gradient of {name}": digest(grad) for name, grad in full_grads(model).items()}
            norm = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
            optimizer.step()
            tensors["gradient norm"] = digest(norm)
            tensors |= {f"parameter {name}": digest(value) for name, value in full_parameters(model).items()}
            record.append(Step.record(loss.item(), norm.item(), tensors))
            if progress_path is not None and dist.get_rank(tp_group) == 0:
                with open(progress_path, "a") as progress:
                    progress.write(json.dumps(record[-1].loss) + "\n")
        return record


class Batches:
    """The same random windows of the text on every rank and at every degree."""

    def __init__(self, config: TrainConfig) -> None:
        self.text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
        self.generator = torch.Generator().manual_seed(config.seed)
        self.batch, self.sequence, self.device = config.batch, config.model.sequence, config.model.device

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets), both [B, S]; the targets are the bytes that follow."""
        starts = torch.randint(len(self.text) - self.sequence, (self.batch, 1), generator=self.generator)
        windows = self.text[starts + torch.arange(self.sequence + 1)].to(self.device)
        return windows[:, :-1], windows[:, 1:]


def read_text(limit: int = 1_000_000) -> bytes:
    """The sources of Python's own standard library, the first `limit` bytes of them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 100_000:
        raise FileNotFoundError(f"the demo trains on Python's standard library, but {folder} holds no .py sources")
    return bytes(text[:limit])


def machine(device: str) -> str:
    """What the digests depend on besides the options: other sources are other data, other vector units other bits."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"{torch.backends.cpu.get_cpu_capability()} on {cpu_model()}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {where}"


# --- running and watching -------------------------------------------------------------------------------------------


def _start(tp_group: Any) -> None:
    """Nothing: a first call, so that the pool starts."""


def run(degrees: Sequence[int], config: TrainConfig, invariant: bool, watch: Watch) -> Runs:
    """Trains at each degree: degree -> each rank's record."""
    runs: dict[int, list[list[Step]]] = {}
    device = config.model.device
    for degree in degrees:
        with temporary_folder("demo") as folder:
            path = folder / "progress"
            path.touch()
            label = f"mode {'on ' if invariant else 'off'} TP={degree}"
            arguments = (train, degree, config, invariant, str(path))
            runs[degree] = watch.follow(label, path, lambda a=arguments: run_ranks(*a, device=device, timeout=3600.0))
    return runs


# --- the command line -----------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit status; `argv` None takes the script's own arguments."""
    parser = make_parser(None if argv is None else "tp-invariant demo")
    options = parser.parse_args(argv)
    degrees, config = check_options(options, parser.error)
    if config.model.sequence >= len(read_text()):
        parser.error(f"--sequence {config.model.sequence} is too long for the {len(read_text()):,} bytes of text")
    if config.model.device == "cpu" and config.model.dtype != torch.float32:
        avoid_trapped_units()  # the stock path, with the mode off, takes torch's own 16-bit products
    try:
        return _compare(degrees, config, options)
    except KeyboardInterrupt:
        discard_pool(config.model.device)
        print("interrupted", file=sys.stderr)
        return 130
    except (RankError, OSError) as error:
        print(f"the demo could not run: {error}", file=sys.stderr)
        return 1


def _compare(degrees: list[int], config: TrainConfig, options: argparse.Namespace) -> int:
    model = config.model
    extra = ", sequence parallel" if model.sequence_parallel else ""
    print(
        f"A transformer of {model.layers} blocks, hidden {model.hidden}, {model.heads} heads, ffn {model.ffn}, "
        f"{str(model.dtype).removeprefix('torch.')} on {model.device}{extra};\n"
        f"{config.steps} steps of {config.batch} x {model.sequence} bytes out of {len(read_text()):,} of the sources "
        f"of Python's library.\n{machine(model.device)}.\nStarting {max(degrees)} rank processes ..",
        flush=True,
    )
    run_ranks(_start, max(degrees), device=model.device)  # the most at once: a pool that grows starts anew
    watch = Watch(config.steps)
    on = run(degrees, config, True, watch) if options.mode in ("on", "both") else None
    off = run(degrees, config, False, watch) if options.mode in ("off", "both") else None
    if on is not None:
        print_table("mode on", on)
    if off is not None:
        print_table("mode off, the negative control: torch's matmul and all-reduce", off)
    if options.picture is not None:
        try:
            saved = save_picture(options.picture, on, off)
        except OSError as error:
            print(f"No picture: {error}")
        else:
            missing = "No picture: matplotlib is not installed (pip install matplotlib, or ask for --no-picture)"
            print(f"Picture: {options.picture.resolve()}" if saved else missing)
    line, good = verdict(on, off)
    print(line)
    return 0 if good else 1


if __name__ == "__main__":
    # by its name in the package, by which the rank processes import it too
    from tp_invariant.examples.train_across_tp import main as run_main

    sys.exit(run_main())
