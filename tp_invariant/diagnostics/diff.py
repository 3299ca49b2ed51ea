"""`tp-invariant diff A.log B.log`: whether two runs' digest logs are identical, else the first step that differs."""

from __future__ import annotations

import argparse
import json
import math
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .digest_log import FORMAT

_SHOWN = 5


class LogError(ValueError):
    """A log that cannot be read, or logs that cannot be compared."""


@dataclass
class Log:
    """A digest log. `steps` are by number; if the file has a step twice, the later line counts."""

    name: str
    parameters: dict[str, str] = field(default_factory=dict)
    degrees: list[int] = field(default_factory=list)  # of each part of a run that was resumed
    modes: list[bool] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        modes = {True: "on", False: "off"}
        parts = [f"TP={p}, mode {modes[mode]}" for p, mode in zip(self.degrees, self.modes, strict=True)]
        return f"{self.name}: {'; then '.join(parts)}; {len(self.steps)} steps"


def read_log(path: str | Path) -> Log:
    """Reads what `DigestLog` wrote; logs of a resumed run may be concatenated.

    Raises:
        LogError: names the file and the line that is not one of a digest log. An unfinished last line is ignored.
    """
    log = Log(str(path))
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break  # the run was killed while it wrote
        try:
            _take(log, json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise LogError(f"line {number} of {path} is not a line of a digest log: {error}") from error
    if not log.steps:
        raise LogError(f"{path} holds no steps: is it a digest log?")
    return log


def _take(log: Log, record: Any) -> None:
    """Adds a header or a step to the log; ValueError for what is neither."""
    if "format" not in record:
        if not log.degrees:
            raise ValueError("there is no header before it")
        log.steps[record["step"]] = {"ranks_differ": {}, **record}
        return
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {reprlib.repr(record['format'])}, not {FORMAT!r}")
    if log.degrees and record["parameters"] != log.parameters:
        raise ValueError(f"the model has changed: {_first_difference(log.parameters, record['parameters'])}")
    log.parameters = record["parameters"]
    log.degrees.append(record["degree"])
    log.modes.append(record["mode"])


def _first_difference(a: dict[str, str], b: dict[str, str]) -> str:
    name = next(name for name in (*a, *b) if a.get(name) != b.get(name))
    return f"{name} is {a.get(name, 'not there')} and {b.get(name, 'not there')}"


def compare(a: Log, b: Log) -> tuple[str, bool]:
    """(what to print, whether all steps that both logs have are identical).

    Raises:
        LogError: logs of different models, or without a step in common.
    """
    if a.parameters != b.parameters:
        raise LogError(
            f"{a.name} and {b.name} are of different models: {_first_difference(a.parameters, b.parameters)}"
        )
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        raise LogError(f"{a.name} and {b.name} have no step in common")
    left_out = [
        f"{len(log.steps) - len(common)} steps of {log.name} have no counterpart"
        for log in (a, b)
        if len(log.steps) > len(common)
    ]
    lines = [str(a), str(b), *left_out]
    for count, step in enumerate(common):
        one, other = a.steps[step], b.steps[step]
        names = list(one["tensors"] | other["tensors"])
        different = [name for name in names if one["tensors"].get(name) != other["tensors"].get(name)]
        lines += [
            f"step {step} of {log.name}: ranks {str(ranks).strip('[]')} differ from rank 0 in {name}"
            for log in (a, b)
            for name, ranks in list(log.steps[step]["ranks_differ"].items())[:_SHOWN]
        ]
        if different:
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            lines.append(f"step {step} differs, the first of {len(common)} in common after {count} identical ones")
            lines.append(f"{len(different)} of {len(names)} tensors: {', '.join(different[:_SHOWN])}{more}")
            losses = one["loss"], other["loss"]
            lines.append(f"loss {losses[0]!r} and {losses[1]!r}")
            if all(isinstance(loss, float) and math.isnan(loss) for loss in losses):
                lines.append("both losses are NaN: the runs had diverged before")
        if different or one["ranks_differ"] or other["ranks_differ"]:
            return "\n".join(lines), False
    return "\n".join([*lines, f"identical for {len(common)} steps, {common[0]} to {common[-1]}"]), True


def main(argv: Sequence[str]) -> int:
    """Prints the comparison and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tp-invariant diff",
        description="Compare two digest logs (tp_invariant.DigestLog), of any degrees, step by step.",
        epilog="A resumed run may have appended to its log, or its logs may be concatenated; if a step is there twice, "
        "the later line counts. Exit status: 0 if all common steps are identical, 1 if not, 2 if the logs cannot be "
        "compared.",
    )
    parser.add_argument("logs", nargs=2, metavar="LOG", help="a file written by DigestLog")
    options = parser.parse_args(argv)
    try:
        text, same = compare(*map(read_log, options.logs))
    except LogError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0 if same else 1
