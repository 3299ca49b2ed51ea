"""What the last call of clip_grad_norm_ found out about its parameters, for the next call of the same parameters.

A training step clips the same parameters again and again, and how each is sharded, what the ranks compare of it, and
where its partial sums go is the same every time. `key_of` reads from every parameter and gradient what all of that
depends on. If a call's key equals that of the call before, only the gradients' memory is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.collectives import Group
from ..core.dtensors import is_dtensor
from .grad_partial_sums import KnownSums, MeshLayout

_NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes", "tp_group")
_marks = itemgetter(*_NAMES)
_ABSENT = object()


class ClipKey(NamedTuple):
    """`key_of`'s result. `facts` decides; the lists hold each parameter's gradient and this rank's part of it."""

    facts: list[Any]
    grads: list[Any]
    locals: list[Any]


class KnownQuestion(NamedTuple):
    """What is compared over a group: see Question. whole: which of the gradients, by index."""

    facts: Any
    whole: list[int]


class KnownClip:
    """What was found out. It holds no tensor, so that gradients and parameters can be freed.

    facts      of the key
    held       (index of the parameter, group over which it is sharded, layout) of each that counts
    with_grad  the indices in `held` of those that have a gradient with elements
    sums       of these
    groups     those that compare
    questions  by group, caller, options and mode
    """

    def __init__(
        self,
        facts: list[Any],
        held: list[tuple[int, Group, MeshLayout | None]],
        with_grad: list[int],
        groups: list[Group],
        rank: int,
        device: torch.device,
    ) -> None:
        self.facts, self.held, self.with_grad = facts, held, with_grad
        self.groups, self.rank, self.device = groups, rank, device
        self.sums = KnownSums()
        self.questions: dict[tuple, KnownQuestion] = {}


# by the first parameter: what is known of a model goes with it, and with it the groups that it names
_known: Any = WeakIdKeyDictionary()


def key_of(parameters: Sequence[Tensor], given: Group | None) -> ClipKey | None:
    """None for a call that must be looked at in full: other kinds of tensors, gradients that are not dense or are in
    main_grad, and what is sharded over ranks that only the whole process can tell."""
    facts: list[Any] = [given, parameters[0].device, *map(id, parameters)]
    grads: list[Any] = []
    parts: list[Any] = []
    with torch._C.DisableTorchFunctionSubclass():  # else torch takes four times as long to say anything of a DTensor
        for p in parameters:
            attributes, grad = p.__dict__, p.grad
            try:
                marks = _marks(attributes)
            except KeyError:
                marks = tuple([attributes.get(name, _ABSENT) for name in _NAMES])
            sharded, group = marks[0], marks[4]
            if given is None and sharded and sharded is not _ABSENT and (group is None or group is _ABSENT):
                return None
            local = grad
            if type(p) is nn.Parameter:
                if grad is not None and type(grad) is not Tensor:
                    return None
                facts.append((marks, attributes.get("shared"), p.shape))
            elif is_dtensor(p) and sharded is not _ABSENT:
                spec: Any = p._spec
                if grad is not None:
                    if not is_dtensor(grad) or type(grad._local_tensor) is not Tensor:
                        return None
                    local = grad._local_tensor
                    if grad._spec is not spec:
                        spec = spec, grad._spec
                facts.append((marks, attributes.get("shared"), spec))
            else:
                return None
            grads.append(grad)
            parts.append(local)
            if local is not None:
                facts.append((local.dtype, local.shape, local.device))
                if local.layout is not torch.strided:
                    return None
            elif "_gradient_is_in_main_grad" in attributes:
                return None
    return ClipKey(facts, grads, parts)


def find(parameters: Sequence[Tensor], key: ClipKey) -> KnownClip | None:
    known = _known.get(parameters[0])
    return known if known is not None and known.facts == key.facts else None


def remember(parameters: Sequence[Tensor], known: KnownClip) -> None:
    _known[parameters[0]] = known
