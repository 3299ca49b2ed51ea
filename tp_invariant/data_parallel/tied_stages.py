"""A weight that the first and the last stage of a pipeline share: an embedding, and the output layer tied to it.

Each of the two holds a copy. In one process autograd adds the two gradients of a micro-batch in the parameter's dtype,
before anything else is added. So the last stage sends its own to the first, which adds them and sums over micro-batches
and data-parallel ranks; the result goes back. Both then make the same step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Group
from ..comm.messages import Messages
from ..core.dtensors import grad_like, local_of


def tie_stages(weight: Tensor, name: str, pp_group: Group) -> None:
    """Marks a weight that the first and the last stage of pp_group hold. A collective.

    Attributes of the parameter:
        tied_stage   of these two stages: Messages between them
        copy_of      of the last one: the name that the weight has in the first
        shared       of the last one: True, so that clip_grad_norm_ counts the weight once
    """
    last = pp_group.size - 1
    messages = Messages(pp_group, 0 if pp_group.rank else last)
    messages.connect()
    if pp_group.rank in (0, last):
        weight.tied_stage = messages  # type: ignore[attr-defined]
    if pp_group.rank == last:
        weight.copy_of, weight.shared = name, True  # type: ignore[attr-defined]


class TiedGradients:
    """The gradients of those of a tree's parameters that two stages share.

    `copies`: the indices of those whose sum the first stage computes.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._tied = {i: p for i, p in enumerate(parameters) if hasattr(p, "tied_stage")}
        self.copies = [i for i, p in self._tied.items() if hasattr(p, "copy_of")]

    def __bool__(self) -> bool:
        return bool(self._tied)

    def send(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Sends a copy's gradients of a micro-batch, one for each chunk of the sequence."""
        p = self._tied[index]
        for gradient in gradients:
            p.tied_stage.send(_or_nothing(gradient, p))

    def add(self, index: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """A parameter's gradients of a micro-batch, to which those are added that its copy has sent."""
        if (p := self._tied.get(index)) is None:
            return gradients
        return [p.tied_stage.receive(local_of(p)).add_(_or_nothing(gradient, p)) for gradient in gradients]

    def agree(self, step: Callable[[], Any]) -> Any:
        """step() on both stages: if it fails on one of them, the other does not wait for it.

        Raises:
            RuntimeError: it has failed on the other stage.
        """
        if not self._tied:
            return step()
        i, p = next(iter(self._tied.items()))
        error: Exception | None = None
        try:
            found = step()
        except (TypeError, ValueError, RuntimeError) as raised:
            error = raised
        failed = torch.tensor([error is not None], dtype=torch.int32, device=local_of(p).device)
        steps = [lambda: p.tied_stage.send(failed), lambda: p.tied_stage.receive(failed)]
        theirs = [step() for step in (reversed(steps) if i in self.copies else steps)]
        p.tied_stage.wait()
        if error is not None:
            raise error
        if any(bool(x) for x in theirs if x is not None):
            raise RuntimeError("reduce() has failed on the other stage that holds the tied embeddings; see its error")
        return found

    def give_back(self, attribute: str) -> None:
        """Sends the finished gradient, in `attribute` of the first weight, to its copy."""
        for i, p in self._tied.items():
            if i in self.copies:
                like = torch.empty_like(local_of(p), dtype=torch.float32 if attribute == "main_grad" else p.dtype)
                setattr(p, attribute, grad_like(p.tied_stage.receive(like), p))
            else:
                p.tied_stage.send(local_of(getattr(p, attribute)))
                p.tied_stage.wait()


def _or_nothing(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """-0.0 where there is no gradient, as in MicroBatchTree.add."""
    return torch.full_like(local_of(parameter), -0.0) if gradient is None else gradient
