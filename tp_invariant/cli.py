"""The `tp-invariant` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tp-invariant",
        description="Tensor-parallel layers whose bits do not depend on the tensor-parallel degree.",
    )
    parser.add_argument("--version", action="version", version=f"tp-invariant {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="train a small transformer at several degrees and compare bits", add_help=False)
    options, rest = parser.parse_known_args(arguments[:1])
    assert options.command == "demo" and not rest
    from .examples.train_across_tp import main as demo  # heavy, and only this command needs it

    return demo(arguments[1:])
