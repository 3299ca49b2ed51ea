"""What the demo shows: progress, which runs differ and where, tables, texts, the verdict, the picture."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tp_invariant.core.bits import raw_bytes
from tp_invariant.examples.words import join
from tp_invariant.testing import digest

SHOWN = 12  # hex digits of a digest that are printed; all 64 are compared
PARTS = "|"  # stands in a text before the first word that differs


@dataclass(frozen=True)
class Step:
    """What one rank saw in one training step. `tensors` maps a name to the digest of that value's or tensor's bytes."""

    loss: float
    grad_norm: float
    tensors: Mapping[str, str]
    digest: str

    @classmethod
    def record(cls, loss: float, grad_norm: float, tensors: Mapping[str, str]) -> Step:
        return cls(loss, grad_norm, tensors, digest(dict(tensors)))


@dataclass(frozen=True)
class Record:
    """What one rank of one run brings back."""

    steps: Sequence[Step]
    words: Sequence[str]  # by which the trained model continued the prompt
    parameters: Mapping[str, Tensor]  # the trained ones, whole; of rank 0 alone


Runs = Mapping[int, Sequence[Record]]  # by degree, the reference first; then by rank


@dataclass(frozen=True)
class Difference:
    """The first step at which some rank of a run differs from rank 0 of the reference run."""

    degree: int
    rank: int
    step: int  # counted from 1
    tensor: str
    reference: int

    def __str__(self) -> str:
        return f"differs from TP={self.reference} from step {self.step} on: {self.tensor} (rank {self.rank})"


def differences(runs: Runs) -> dict[int, Difference | None]:
    """For each degree, where it first differs from the first degree's rank 0, on any rank; None if nowhere."""
    reference = next(iter(runs))
    return {degree: _first_difference(degree, ranks, reference, runs[reference][0]) for degree, ranks in runs.items()}


def _first_difference(degree: int, ranks: Sequence[Record], reference: int, expected: Record) -> Difference | None:
    found: list[Difference] = []
    for rank, record in enumerate(ranks):
        got, wanted = len(record.steps), len(expected.steps)
        if got != wanted:
            found.append(Difference(degree, rank, min(got, wanted) + 1, "the number of steps", reference))
        for number, (step, want) in enumerate(zip(record.steps, expected.steps, strict=False), start=1):
            if step.digest != want.digest:
                names = [*want.tensors, *(name for name in step.tensors if name not in want.tensors)]
                parted = [name for name in names if step.tensors.get(name) != want.tensors.get(name)]
                found.append(Difference(degree, rank, number, parted[0] if parted else "the digest", reference))
                break
        if word := parting(record.words, expected.words):
            found.append(Difference(degree, rank, wanted, f"word {word} of the text", reference))
    return min(found, key=lambda d: d.step, default=None)  # of equal steps the lowest rank, and its tensors first


def parting(words: Sequence[str], expected: Sequence[str]) -> int | None:
    """The first word, counted from 1, in which two texts differ; None if they are the same."""
    if list(words) == list(expected):
        return None
    same = [word == want for word, want in zip(words, expected, strict=False)]
    return (same.index(False) if False in same else len(same)) + 1


def share_of_parameters(runs: Runs, degree: int) -> float:
    """Of the trained parameters, the share whose bytes are not the reference's."""
    expected = next(iter(runs.values()))[0].parameters
    got = runs[degree][0].parameters
    differ = sum(int((raw_bytes(got[name]) != raw_bytes(want)).any(1).sum()) for name, want in expected.items())
    return differ / sum(want.numel() for want in expected.values())


def loss_differences(runs: Runs, degree: int) -> list[float]:
    """|loss - reference's loss| at each step, the largest over the degree's ranks."""
    expected = next(iter(runs.values()))[0].steps
    return [
        max(abs(record.steps[i].loss - expected[i].loss) for record in runs[degree] if i < len(record.steps))
        for i in range(len(expected))
    ]


# --- tables and verdict ---------------------------------------------------------------------------------------------


def rows(runs: Runs) -> list[tuple[str, ...]]:
    """The table as text: its headings, then one row for each degree."""
    reference, steps = next(iter(runs)), len(next(iter(runs.values()))[0].steps)
    found = differences(runs)
    headings = ("TP", "last loss", "largest gap", "parameters apart", "digest")
    result: list[tuple[str, ...]] = [(*headings, f"compared with TP={reference}")]
    for degree, ranks in runs.items():
        last, apart = ranks[0].steps[-1].loss, max(loss_differences(runs, degree))
        same = "the reference" if degree == reference else f"identical for all {steps} steps, {degree} ranks"
        result.append(
            (
                str(degree),
                f"{last:.9f}",
                "0" if apart == 0 else f"{apart:.2g}",
                _percent(share_of_parameters(runs, degree)),
                digest([step.digest for step in ranks[0].steps])[:SHOWN],
                str(found[degree] or same),
            )
        )
    return result


def _console() -> Any:
    """Of rich, or None where it is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False)
    return (
        console if console.is_terminal else Console(highlight=False, width=120)
    )  # a log's lines need not fit a window


def print_table(title: str, runs: Runs) -> None:
    """With rich where it is installed, else plain text."""
    headings, *body = rows(runs)
    console = _console()
    if console is None:
        widths = [max(map(len, column)) for column in zip(headings, *body, strict=True)]
        print(f"\n{title}")
        for row in (headings, *body):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    *numbers, comparison = headings
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column(comparison)
    for row, difference in zip(body, differences(runs).values(), strict=True):
        table.add_row(*row[:-1], Text(row[-1], style="red" if difference else "green"))
    console.print()
    console.print(table)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share else "0"


def texts(on: Runs | None, off: Runs | None) -> list[tuple[str, Sequence[str], int | None]]:
    """(whose text, its words, at which it parts from the reference's) for each text that the runs wrote."""
    result: list[tuple[str, Sequence[str], int | None]] = []
    for mode, runs in (("on", on), ("off", off)):
        if runs is None:
            continue
        reference = next(iter(runs))
        expected = runs[reference][0].words
        writers: dict[tuple[str, ...], list[int]] = {}
        for degree, ranks in runs.items():
            for words in dict.fromkeys(tuple(record.words) for record in ranks):  # of the ranks one, if they agree
                writers.setdefault(words, []).append(degree)
        for words, degrees in writers.items():
            word = parting(words, expected)
            where = f", parts from TP={reference} at word {word}" if word else ""
            result.append((f"mode {mode}, {_names(degrees)}{where}", words, word))
    return result


def print_texts(prompt: str, on: Runs | None, off: Runs | None) -> None:
    """Each text once, with whose it is; from where it parts in red, where rich is installed."""
    console, found, reference = _console(), texts(on, off), next(iter(on or off or ()))
    marked = f"; {PARTS} marks where a text parts from TP={reference}'s" if any(word for *_, word in found) else ""
    print(f'\nThe trained model continues "{prompt}" by its likeliest words{marked}')
    width = 120 if console is None else min(console.width, 120)
    for title, words, word in found:
        same = words[: word - 1] if word else words
        lines = join([prompt, *same, *([PARTS, *words[word - 1 :]] if word else [])])
        lines = textwrap.fill(lines, width, initial_indent="    ", subsequent_indent="    ")
        print(f"  {title}:")
        if console is None:
            print(lines)
        else:
            from rich.text import Text

            before, mark, after = lines.partition(PARTS)
            console.print(Text(before).append(mark + after, style="red"))


def verdict(on: Runs | None, off: Runs | None) -> tuple[str, bool]:
    """One line on what was shown, and whether it is what should be: equal with the mode on, different with it off."""
    parts, good = [], True
    if on is not None:
        wrong = [difference for difference in differences(on).values() if difference]
        if wrong:
            good = False
            parts.append(f"FAILED, mode on: TP={wrong[0].degree} {wrong[0]}")
        else:
            record = next(iter(on.values()))[0]
            parts.append(
                f"mode on: {_names(on)} bit for bit the same on every rank for all {len(record.steps)} steps, and in "
                f"all {len(record.words)} words"
            )
    if off is not None:
        parted = [difference for difference in differences(off).values() if difference]
        if parted:
            apart = max(max(loss_differences(off, degree)) for degree in off)
            share = max(share_of_parameters(off, degree) for degree in off)
            expected = off[parted[0].reference][0].words
            words = {degree: parting(ranks[0].words, expected) for degree, ranks in off.items()}
            others = {degree: word for degree, word in words.items() if word}
            text = ", ".join(map(str, others.values()))
            parts.append(
                f"mode off: {_names([d.degree for d in parted])} left TP={parted[0].reference} at step "
                f"{min(d.step for d in parted)}, by up to {apart:.2g} in the loss and in {_percent(share)} of the "
                f"parameters, and "
                + (f"{_names(list(others))} in the text at word {text}" if others else "wrote the same text")
            )
        elif len(off) > 1:
            good = False
            parts.append(
                f"WARNING, mode off: {_names(off)} agree too, so this control proves nothing; take larger sizes"
            )
    degrees = on or off
    if degrees is not None and len(degrees) == 1:
        parts.append("one degree alone, so there was nothing to compare it with")
    return "Verdict: " + "; ".join(parts) + ".", good


def _names(degrees: Sequence[int] | Runs) -> str:
    return "TP=" + ", ".join(map(str, degrees))


# --- progress -------------------------------------------------------------------------------------------------------


class Watch:
    """Shows how far a run is: a bar where rich is installed and someone is looking, and a line when it is done."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.bar: Any = None
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, transient=True)

    def follow(self, label: str, path: Path, work: Callable[[], Any]) -> Any:
        """Runs `work` on a thread and shows the losses that appear in the file at `path` meanwhile."""
        result: list[Any] = []
        errors: list[BaseException] = []

        def target() -> None:
            try:
                result.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=target, daemon=True)
        start = time.monotonic()
        thread.start()
        task = None
        if self.bar is not None:
            self.bar.start()
            task = self.bar.add_task(label, total=self.steps)
        try:
            while thread.is_alive():
                thread.join(0.1)
                losses = _losses(path)
                if losses and self.bar is not None:
                    self.bar.update(task, completed=len(losses), description=f"{label}  loss {losses[-1]:.3f}")
        finally:
            if self.bar is not None:
                self.bar.remove_task(task)
                self.bar.stop()
        if errors:
            raise errors[0]
        losses = _losses(path)
        seconds = time.monotonic() - start
        print(f"{label}  {self.steps} steps in {seconds:5.1f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
        return result[0]


def _losses(path: Path) -> list[float]:
    *lines, _unfinished = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


# --- the picture ----------------------------------------------------------------------------------------------------


def save_picture(path: Path, on: Runs | None, off: Runs | None) -> bool:
    """Loss, and how far each degree's loss is from the first degree's; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    from matplotlib.figure import Figure  # not pyplot: no window, no global state
    from matplotlib.ticker import MaxNLocator

    shown = on or off or {}
    reference, *others = shown
    steps = range(1, len(shown[reference][0].steps) + 1)
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    figure.suptitle("The same transformer, trained at several tensor-parallel degrees")
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    left.plot(steps, [step.loss for step in shown[reference][0].steps], color="black", marker=".", linewidth=1.2)
    left.set(title=f"Loss at TP={reference}", xlabel="training step", ylabel="cross-entropy, nats per word")

    seen: list[float] = []
    colours = matplotlib.colormaps["viridis"]
    for index, degree in enumerate(others):
        for mode, runs in (("on", on), ("off", off)):
            apart = loss_differences(runs, degree) if runs is not None else [0.0]
            if any(apart):
                seen += [value for value in apart if 0 < value < float("inf")]
                style: dict[str, Any] = {"color": colours(0.85 * index / len(others)), "marker": "."}
                style |= {"linestyle": "--" if mode == "on" else "-", "linewidth": 1.2}
                right.plot(steps, apart, label=f"mode {mode}, TP={degree}", **style)
    zero = [degree for degree in others if on is not None and not any(loss_differences(on, degree))]
    if zero:  # these lines would hide each other
        label = f"mode on, {_names(zero)}: exactly 0"
        right.plot(steps, [0] * len(steps), color="tab:red", linewidth=5, clip_on=False, label=label)
    floor = 10.0 ** math.floor(math.log10(min(seen, default=1e-9)))
    right.set_yscale("symlog", linthresh=floor, linscale=0.5)  # logarithmic, but with a place for zero
    right.set_ylim(0, max(seen, default=1e-6) * 300)  # room for the legend
    right.set(title=f"Distance from it at the other degrees: |loss - loss at TP={reference}|", xlabel="training step")
    right.grid(axis="y", alpha=0.25)
    if right.lines:
        right.legend(loc="upper left", ncols=2, frameon=False, fontsize=9)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    return True
