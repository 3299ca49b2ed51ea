"""Which of TRL's trainers are right here, and what they measure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ..comm.wire import gather_objects
from ..core.dtensors import is_dtensor
from ..layers.parameters import named_shard_specs
from .training import Ranks

T = TypeVar("T")


def check_trl(kind: type, model: nn.Module, ranks: Ranks) -> None:
    """Of a class that is one of TRL's trainers too, which multiply by the output layer's weight themselves.

    Raises:
        ValueError: another than those of integrations/trl.py; plain shards with SFT and DPO; sequence parallelism.
    """
    theirs = [base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl"]
    if not theirs:
        return
    own = [base.__name__ for base in kind.__mro__ if base.__module__ == f"{__package__}.rollouts"]
    if theirs[0] not in ("SFTTrainer", "DPOTrainer", *(("GRPOTrainer", "RLOOTrainer") if own else ())):
        raise ValueError(
            f"{kind.__name__} is TRL's {theirs[0]} on rank {ranks.index}, which is not known to be right here: take "
            "one of the trainers in tp_invariant.integrations.trl"
        )
    plain = [name for name, p, spec in named_shard_specs(model) if spec.dim is not None and not is_dtensor(p)]
    if ranks.tp.size > 1 and plain and not own:  # GRPO and RLOO multiply by token_log_probs
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
        self._own: list[dict[str, list[float]]] = []  # of this rank's micro-batches in the step

    def of_next(self, training_step: Callable[[], T]) -> T:
        """training_step() of this rank's next micro-batch."""
        measured = getattr(self.trainer, "_metrics", {}).get("train", {})
        before = {name: len(values) for name, values in measured.items()}
        result = training_step()
        if self.ranks.dp.size > 1:
            new = {name: values[before.get(name, 0) :] for name, values in measured.items() if name != "num_tokens"}
            self._own.append({name: values for name, values in new.items() if values})
            for name in self._own[-1]:
                del measured[name][before.get(name, 0) :]
        return result

    def gather(self, share: range) -> None:
        """A collective. share: the numbers of the micro-batches that this rank has computed in the step."""
        trainer = self.trainer
        if self.ranks.dp.size == 1 or not hasattr(trainer, "_total_train_tokens"):
            return
        measured, own = trainer._metrics["train"], [*zip(share, self._own, strict=True)]
        self._own.clear()
        everyone = gather_objects((own, trainer._total_train_tokens - self._tokens), self.ranks.dp)
        numbered = itertools.chain.from_iterable(of_rank for of_rank, _ in everyone)
        for _, values_of in sorted(numbered, key=lambda pair: pair[0]):
            for name, values in values_of.items():
                measured[name].extend(values)
        self._tokens += sum(tokens for _, tokens in everyone)
        if self._tokens:  # of trainers that count them by micro-batch
            trainer._total_train_tokens = self._tokens
            measured["num_tokens"] = [self._tokens]
