"""The order in which gathered weights are used, learnt from what was seen, so that the next one can start early.

A training step uses the same weights in the same order again and again. `Schedule` writes down every use and looks up
where it has seen the last two before: what came next then is expected now. A first step is all new; from the second on
each use is foreseen, also where activation checkpointing uses a forward's weights again in the middle of backward, and
after a deviation (another branch, an evaluation) the place is found again after two rounds at most.

What it answers depends on the uses alone. They come in the same order on every rank of a group, since each of them is a
collective of that group, so all ranks expect the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

# Forgets everything after so many uses and learns again: a hundred steps of a large model. Some megabytes at most where
# each use is of a new tensor (under autocast, say).
LIMIT = 16384


class Phase(Enum):
    """Where in a program a weight is used."""

    INFERENCE = 0  # outside backward, gradients off
    FORWARD = 1  # outside backward, gradients on
    BACKWARD = 2


class Schedule:
    """`note` each use; `expected` says what comes next and may be started now."""

    def __init__(self) -> None:
        self._forget()
        self._round: set[Hashable] = set()
        self._phase: tuple[Phase, int] | None = None

    def _forget(self) -> None:
        self._seen: list[tuple[Hashable, Phase]] = []
        self._next_place: dict[tuple, int] = {}  # (use,) and (use before, use) -> where what followed them stands
        self._place: int | None = None  # of what is expected next

    def note(self, use: Hashable, phase: Phase, task: int = -1) -> None:
        """`use` happens now; `task` tells one backward from another."""
        if (phase, task) != self._phase or use in self._round:
            self._round.clear()
        self._phase = phase, task
        self._round.add(use)
        if len(self._seen) >= LIMIT:
            self._forget()
        pair = self._seen[-1][0] if self._seen else None, use
        if self._place is not None and self._place < len(self._seen) and self._seen[self._place][0] == use:
            self._place += 1
        else:
            self._place = self._next_place.get(pair, self._next_place.get((use,)))
        self._seen.append((use, phase))
        self._next_place[pair] = self._next_place[(use,)] = len(self._seen)

    def expected(self) -> Hashable | None:
        """What is used next, None where that is unknown or must not be read yet.

        Optimizers and weight loading may write weights between one pass over a model and the next, through `.data`
        too, which raises no version. So what is expected must belong to the same pass: not after the end of a backward,
        not what this pass has used already (then the next pass begins), and gradients on or off as now. From a forward
        into its backward is fine: autograd needs the weights unchanged in between anyway.
        """
        if self._place is None or self._place >= len(self._seen) or self._phase is None:
            return None
        use, phase = self._seen[self._place]
        now = self._phase[0]
        same_pass = use not in self._round if phase == now else (now, phase) == (Phase.FORWARD, Phase.BACKWARD)
        return use if same_pass else None
