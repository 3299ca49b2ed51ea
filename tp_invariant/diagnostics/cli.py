"""The `tp-invariant` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ..version import __version__

# subcommand: (the module with its main(argv), imported when it runs, and what it does)
COMMANDS = {
    "demo": ("examples.train_across_tp", "train a small transformer at several degrees and compare bits"),
    "verify": ("diagnostics.verify", "run the contract on this machine: every part, every degree, byte for byte"),
    "doctor": ("diagnostics.doctor", "what this machine has, and which of the library's claims hold on it"),
    "bench": ("diagnostics.bench", "what the mode costs here, on layers of sizes of yours: times with it on and off"),
    "diff": ("diagnostics.diff", "compare the digest logs of two runs, step by step"),
    "fingerprint": (
        "diagnostics.fingerprint",
        "digests of what the kernels compute on fixed inputs, to compare machines",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tp-invariant",
        description="Tensor-parallel layers whose bits do not depend on the tensor-parallel degree.",
    )
    parser.add_argument("--version", action="version", version=f"tp-invariant {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    return import_module(f"tp_invariant.{COMMANDS[command][0]}").main(arguments[1:])
