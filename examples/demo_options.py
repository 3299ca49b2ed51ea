"""The demo's command line: its options, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from tp_invariant.examples.small_transformer import VOCABULARY, ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """What every rank of every run is told."""

    model: ModelConfig
    steps: int
    batch: int
    learning_rate: float
    seed: int
    words: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1")
    return int(text)


def _degrees(text: str) -> list[int]:
    return sorted({_positive(part.strip()) for part in text.split(",")})


def _picture_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist")
    return path


def make_parser(prog: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Train a small transformer at several tensor-parallel degrees and compare every bit.",
        epilog="Exit status: 0 if bits agree with the mode on and differ with it off, 1 if not, 2 for a wrong option.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--degrees",
        type=_degrees,
        default="1,2,4,8",
        metavar="P,P,..",
        help="tensor-parallel degrees, whole numbers that divide the sizes below; the lowest is the reference",
    )
    add("--mode", choices=("on", "off", "both"), default="both", help="the invariant mode; off is the negative control")
    add("--steps", type=_positive, default=40, metavar="N", help="training steps at each degree")
    add("--layers", type=_positive, default=1, metavar="N", help="transformer blocks")
    add("--hidden", type=_positive, default=128, metavar="N", help="width; a multiple of --heads")
    add("--heads", type=_positive, default=8, metavar="N", help="attention heads; a multiple of every degree")
    add("--ffn", type=_positive, default=256, metavar="N", help="width of the MLP; a multiple of every degree")
    add("--batch", type=_positive, default=4, metavar="N", help="windows of text in a step")
    add("--sequence", type=_positive, default=64, metavar="N", help="words in a window")
    add("--lr", type=_positive_float, default=1e-2, metavar="X", help="AdamW's learning rate")
    add("--seed", type=_seed, default=8, metavar="N", help="for the weights and the batches; from 0 to 2**63 - 1")
    add("--words", type=_positive, default=30, metavar="N", help="words that each trained model continues a prompt by")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes cuda where there is a GPU")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of weights and activations")
    add("--sequence-parallel", action="store_true", help="shard activations along the sequence between the layers")
    add(
        "--picture",
        type=_picture_path,
        default="tp_invariant_demo.png",
        metavar="PATH",
        help="where to save the picture of the losses: .png, .pdf or .svg",
    )
    add("--no-picture", dest="picture", action="store_const", const=None, default=argparse.SUPPRESS, help="save none")
    return parser


def check_options(options: argparse.Namespace, error: Callable[[str], NoReturn]) -> tuple[list[int], TrainConfig]:
    """The degrees to run and their configuration, or `error` with what is wrong."""
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: torch finds no CUDA device here; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[options.dtype]
    degrees, gpus = options.degrees, torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        degrees = [degree for degree in degrees if degree <= gpus]
        if left_out := [degree for degree in options.degrees if degree > gpus]:
            print(f"TP={', '.join(map(str, left_out))} left out: more ranks than the {gpus} GPUs here")
        if not degrees:
            error(f"--degrees: none is left for {gpus} GPUs; use --device cpu")
    if options.hidden % options.heads:
        error(f"--heads {options.heads} does not divide --hidden {options.hidden}")
    for degree in degrees:
        sizes = {f"--heads {options.heads}": options.heads, f"--ffn {options.ffn}": options.ffn}
        sizes[f"the vocabulary of {VOCABULARY} tokens"] = VOCABULARY
        if options.sequence_parallel:
            sizes[f"--sequence {options.sequence}"] = options.sequence
        for name, size in sizes.items():
            if size % degree:
                error(f"--degrees: {degree} does not divide {name}")
    model = ModelConfig(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        ffn=options.ffn,
        sequence=options.sequence,
        sequence_parallel=options.sequence_parallel,
        dtype=dtype,
        device=device,
    )
    return degrees, TrainConfig(model, options.steps, options.batch, options.lr, options.seed, options.words)
