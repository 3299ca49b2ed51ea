"""Trains one small transformer at several tensor-parallel degrees and compares every bit.

    python examples/train_across_tp.py            or: tp-invariant demo

Each degree starts from the same seed and reads the same text. In every step every rank takes a digest of the loss, all
gradients and their norm, and after the last one of all parameters; then the trained model continues a prompt, each time
with its likeliest word. With the mode on digests and words agree at every degree; with it off, the negative control,
they part.

Read `train` for what a training loop looks like, small_transformer.py for the model; demo_report.py draws the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tp_invariant as tpi
from tp_invariant.diagnostics.doctor import cpu_model
from tp_invariant.diagnostics.onednn import avoid_trapped_units
from tp_invariant.examples.demo_options import TrainConfig, check_options, make_parser
from tp_invariant.examples.demo_report import Record, Runs, Step, Watch, print_table, print_texts, save_picture, verdict
from tp_invariant.examples.small_transformer import Transformer
from tp_invariant.examples.words import PROMPT, TEXT, decode, encode
from tp_invariant.testing import RankError, digest, full_grads, full_parameters, run_ranks
from tp_invariant.testing.rank_pool import discard_pool

# --- training, on every rank ----------------------------------------------------------------------------------------


def train(tp_group: Any, config: TrainConfig, invariant: bool, progress_path: str | None) -> Record:
    """Trains from scratch and returns this rank's record; rank 0 also writes each loss to progress_path."""
    with tpi.set_tp_invariant_mode(invariant):
        torch.manual_seed(config.seed)
        model = Transformer(config.model, tp_group)
        # one tensor at a time: elementwise steps whose bits do not depend on how tensors are grouped or cut
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, foreach=False)
        batches = Batches(config)
        steps: list[Step] = []
        for step in range(config.steps):
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
            if step == config.steps - 1:
                parameters = {name: value.cpu() for name, value in full_parameters(model).items()}
                tensors |= {f"parameter {name}": digest(value) for name, value in parameters.items()}
            steps.append(Step.record(loss.item(), norm.item(), tensors))
            if progress_path is not None and dist.get_rank(tp_group) == 0:
                with open(progress_path, "a") as progress:
                    progress.write(json.dumps(steps[-1].loss) + "\n")
        words = decode(continue_greedily(model, encode(PROMPT), config))
        # parameters from rank 0 alone, to count those that differ: the digests compare all ranks
        return Record(steps, words, parameters if dist.get_rank(tp_group) == 0 else {})


@torch.no_grad()
def continue_greedily(model: Transformer, prompt: list[int], config: TrainConfig) -> list[int]:
    """`config.words` tokens after the prompt, each the likeliest by the model.

    Each forward takes a whole window, padded at its end, which a causal model does not see before it comes there.
    """
    tokens, sequence = list(prompt), config.model.sequence
    for _ in range(config.words):
        seen = tokens[-sequence:]
        window = torch.tensor([seen + [0] * (sequence - len(seen))], device=config.model.device)
        tokens.append(int(model(window)[0, len(seen) - 1].argmax()))
    return tokens[len(prompt) :]


class Batches:
    """The same random windows of the text on every rank and at every degree."""

    def __init__(self, config: TrainConfig) -> None:
        self.text = torch.tensor(encode(TEXT))
        self.generator = torch.Generator().manual_seed(config.seed)
        self.batch, self.sequence, self.device = config.batch, config.model.sequence, config.model.device

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets), both [B, S]; the targets are the words that follow."""
        starts = torch.randint(len(self.text) - self.sequence, (self.batch, 1), generator=self.generator)
        windows = self.text[starts + torch.arange(self.sequence + 1)].to(self.device)
        return windows[:, :-1], windows[:, 1:]


def machine(device: str) -> str:
    """What the digests depend on besides the options: other vector units give other bits."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"{torch.backends.cpu.get_cpu_capability()} on {cpu_model()}"
    return f"torch {torch.__version__}, {where}"


# --- running and watching -------------------------------------------------------------------------------------------


def _start(tp_group: Any) -> None:
    """Nothing: a first call, so that the pool starts."""


def run(degrees: Sequence[int], config: TrainConfig, invariant: bool, watch: Watch) -> Runs:
    """Trains at each degree: degree -> each rank's record."""
    runs: dict[int, list[Record]] = {}
    device = config.model.device
    for degree in degrees:
        with tempfile.TemporaryDirectory(prefix="tp_invariant_demo_") as folder:
            path = Path(folder) / "progress"
            path.touch()
            label = f"mode {'on ' if invariant else 'off'} TP={degree}"
            work = functools.partial(
                run_ranks, train, degree, config, invariant, str(path), device=device, timeout=3600.0
            )
            runs[degree] = watch.follow(label, path, work)
    return runs


# --- the command line -----------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit status; `argv` None takes the script's own arguments."""
    parser = make_parser(None if argv is None else "tp-invariant demo")
    options = parser.parse_args(argv)
    degrees, config = check_options(options, parser.error)
    if config.model.sequence >= len(encode(TEXT)):
        parser.error(f"--sequence {config.model.sequence} is too long for a text of {len(encode(TEXT))} words")
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
    blocks = "1 block" if model.layers == 1 else f"{model.layers} blocks"
    extra = ", sequence parallel" if model.sequence_parallel else ""
    print(
        f"A transformer of {blocks}, hidden {model.hidden}, {model.heads} heads, ffn {model.ffn}, "
        f"{str(model.dtype).removeprefix('torch.')} on {model.device}{extra};\n"
        f"{config.steps} steps of {config.batch} x {model.sequence} words out of a text of {len(encode(TEXT))}.\n"
        f"{machine(model.device)}.\nStarting {max(degrees)} rank processes ..",
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
    print_texts(PROMPT, on, off)
    if options.picture is not None:
        try:
            saved = save_picture(options.picture, on, off)
        except OSError as error:
            print(f"No picture: {error}")
        else:
            missing = "No picture: matplotlib is not installed (pip install matplotlib, or ask for --no-picture)"
            print(f"Picture: {options.picture.resolve()}" if saved else missing)
    line, good = verdict(on, off)
    print(textwrap.fill(line, 118, subsequent_indent="    "))
    return 0 if good else 1


if __name__ == "__main__":
    # by its name in the package, by which the rank processes import it too
    from tp_invariant.examples.train_across_tp import main as run_main

    sys.exit(run_main())
