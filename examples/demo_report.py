"""What the demo shows: progress, which runs differ and where, tables, the verdict, the picture."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant.testing import digest

SHOWN = 12  # hex digits of a digest that are printed; all 64 are compared


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


Records = Sequence[Sequence[Step]]  # by rank, then by step
Runs = Mapping[int, Records]  # by degree, the reference first


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


def _first_difference(degree: int, ranks: Records, reference: int, expected: Sequence[Step]) -> Difference | None:
    found: list[Difference] = []
    for rank, steps in enumerate(ranks):
        if len(steps) != len(expected):
            found.append(Difference(degree, rank, min(len(steps), len(expected)) + 1, "the number of steps", reference))
        for number, (step, want) in enumerate(zip(steps, expected, strict=False), start=1):
            if step.digest != want.digest:
                names = [*want.tensors, *(name for name in step.tensors if name not in want.tensors)]
                parted = [name for name in names if step.tensors.get(name) != want.tensors.get(name)]
                found.append(Difference(degree, rank, number, parted[0] if parted else "the digest", reference))
                break
    return min(found, key=lambda d: d.step, default=None)  # of equal steps the lowest rank


def loss_differences(runs: Runs, degree: int) -> list[float]:
    """|loss - reference's loss| at each step, the largest over the degree's ranks."""
    expected = next(iter(runs.values()))[0]
    return [
        max(abs(steps[i].loss - expected[i].loss) for steps in runs[degree] if i < len(steps))
        for i in range(len(expected))
    ]


# --- tables and verdict ---------------------------------------------------------------------------------------------


def rows(runs: Runs) -> list[tuple[str, ...]]:
    """The table as text: its headings, then one row for each degree."""
    reference, steps = next(iter(runs)), len(next(iter(runs.values()))[0])
    found = differences(runs)
    headings = ("TP", "first loss", "last loss", "largest loss gap", f"digest, all {steps} steps")
    result: list[tuple[str, ...]] = [(*headings, f"compared with TP={reference}")]
    for degree, ranks in runs.items():
        first, last = ranks[0][0].loss, ranks[0][-1].loss
        apart = max(loss_differences(runs, degree))
        same = "the reference" if degree == reference else f"identical for all {steps} steps, {degree} ranks"
        result.append(
            (
                str(degree),
                f"{first:.9f}",
                f"{last:.9f}",
                "0" if apart == 0 else f"{apart:.1e}",
                digest([step.digest for step in ranks[0]])[:SHOWN],
                str(found[degree] or same),
            )
        )
    return result


def print_table(title: str, runs: Runs) -> None:
    """With rich where it is installed, else plain text."""
    headings, *body = rows(runs)
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(headings, *body, strict=True)]
        print(f"\n{title}")
        for row in (headings, *body):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    console = Console(highlight=False)
    if not console.is_terminal:  # a log: lines need not fit a window
        console = Console(highlight=False, width=132)
    table = Table(title=title, title_justify="left", title_style="bold")
    *numbers, comparison = headings
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column(comparison)
    for row, difference in zip(body, differences(runs).values(), strict=True):
        table.add_row(*row[:-1], Text(row[-1], style="red" if difference else "green"))
    console.print()
    console.print(table)


def verdict(on: Runs | None, off: Runs | None) -> tuple[str, bool]:
    """One line on what was shown, and whether it is what should be: equal with the mode on, different with it off."""
    parts, good = [], True
    if on is not None:
        wrong = [difference for difference in differences(on).values() if difference]
        if wrong:
            good = False
            parts.append(f"FAILED, mode on: TP={wrong[0].degree} {wrong[0]}")
        else:
            steps = len(next(iter(on.values()))[0])
            parts.append(f"mode on: {_names(on)} bit for bit the same on every rank for all {steps} steps")
    if off is not None:
        parted = [difference for difference in differences(off).values() if difference]
        if parted:
            apart = max(max(loss_differences(off, degree)) for degree in off)
            parts.append(
                f"mode off: {_names([d.degree for d in parted])} left TP={parted[0].reference} at step "
                f"{min(d.step for d in parted)}, by up to {apart:.1e} in the loss"
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
    steps = range(1, len(shown[reference][0]) + 1)
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    figure.suptitle("The same transformer, trained at several tensor-parallel degrees")
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    left.plot(steps, [step.loss for step in shown[reference][0]], color="black", marker=".", linewidth=1.2)
    left.set(title=f"Loss at TP={reference}", xlabel="training step", ylabel="cross-entropy, nats per byte")

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
    figure.savefig(path, dpi=150)
    return True
