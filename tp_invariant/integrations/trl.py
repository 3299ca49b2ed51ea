"""What TRL's SFTTrainer and DPOTrainer need besides: which of its trainers are right here, and what they measure."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from ..comm.wire import gather_objects
from ..core.dtensors import is_dtensor
from ..layers.parameters import named_shard_specs
from .training import Ranks


def check_trl(kind: type, model: nn.Module, ranks: Ranks) -> None:
    """Of a class that is one of TRL's trainers too, which multiply by the output layer's weight themselves.

    Raises:
        ValueError: another than its SFTTrainer and DPOTrainer; plain shards; sequence parallelism.
    """
    theirs = [base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl"]
    if not theirs:
        return
    if theirs[0] not in ("SFTTrainer", "DPOTrainer"):
        raise ValueError(
            f"{kind.__name__} is TRL's {theirs[0]} on rank {ranks.index}, which is not known to be right here: only "
            "SFTTrainer and DPOTrainer are supported"
        )
    plain = [name for name, p, spec in named_shard_specs(model) if spec.dim is not None and not is_dtensor(p)]
    if ranks.tp.size > 1 and plain:
        raise ValueError(
            f"{plain[0]} is a plain part on rank {ranks.index}, and TRL's {theirs[0]} would take the output layer's "
            "part for the whole: give parallelize mesh['tp'], a DeviceMesh"
        )
    if any(getattr(module, "sequence_parallel", False) for module in model.modules()):
        raise ValueError(
            f"sequence_parallel=True on rank {ranks.index}: TRL's {theirs[0]} would take this rank's tokens for all; "
            "parallelize without it"
        )


class Measurements:
    """What TRL measures of each training micro-batch (entropy, accuracies, rewards), and logs the means of.

    Data parallel ranks exchange it at a step's end: every rank then has that of all micro-batches, in their order.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        self._tokens = 0  # of all ranks' micro-batches until the last step

    def gather(self, share: range) -> None:
        """A collective. share: the numbers of the micro-batches that this rank has computed in the step."""
        trainer, size = self.trainer, len(share)
        if self.ranks.dp.size == 1 or not hasattr(trainer, "_total_train_tokens"):
            return
        measured = trainer._metrics["train"]
        measured.pop("num_tokens", None)  # the total, which is no list of micro-batches
        own = [
            (number, {name: values[place - size] for name, values in measured.items()})
            for place, number in enumerate(share)
        ]
        for values in measured.values():
            del values[len(values) - size :]
        everyone = gather_objects((own, trainer._total_train_tokens - self._tokens), self.ranks.dp)
        numbered = itertools.chain.from_iterable(of_rank for of_rank, _ in everyone)
        for _, values_of in sorted(numbered, key=lambda pair: pair[0]):
            for name, value in values_of.items():
                measured[name].append(value)
        self._tokens += sum(tokens for _, tokens in everyone)
        trainer._total_train_tokens = self._tokens
        measured["num_tokens"] = [self._tokens]
