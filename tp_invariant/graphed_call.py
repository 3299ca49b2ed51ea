"""A call of a layer whose forward and backward are CUDA graphs: what it must have in common with the captured one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import is_capturing
from .mode import is_tp_invariant_mode_enabled

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class Node(NamedTuple):
    """A tuple, list, dict or dataclass, less its tensors."""

    kind: type
    keys: tuple
    values: tuple


class Constant(NamedTuple):
    kind: type  # True, 1 and 1.0 are equal
    value: Any


def flatten(tree: Any, what: str) -> tuple[list[Tensor], Node]:
    """The tensors in nested tuples, lists, dicts and frozen dataclasses, and the rest, which `fill` fills again.

    Raises:
        TypeError: something else than tensors and constants in there.
    """
    tensors: list[Tensor] = []

    def walk(x: Any) -> Any:
        kind = type(x)
        if isinstance(x, Tensor):
            tensors.append(x)
            return None
        if kind is tuple or kind is list:
            return Node(kind, (), tuple(map(walk, x)))
        if kind is dict:
            keys = tuple(sorted(x, key=repr))
            return Node(kind, keys, tuple(walk(x[key]) for key in keys))
        if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            keys = tuple(field.name for field in dataclasses.fields(kind))
            return Node(kind, keys, tuple(walk(getattr(x, key)) for key in keys))
        if isinstance(x, _CONSTANTS):
            return Constant(kind, x)
        raise TypeError(
            f"{what}: a {kind.__name__} cannot be part of a CUDA graph; allowed: tensors, numbers, strings, dtypes, "
            "devices and None, in tuples, lists, dicts and frozen dataclasses (for a cache of keys and values: "
            "use_cache=False)"
        )

    node = walk(tree)
    return tensors, node


def fill(node: Node, tensors: Iterable[Any]) -> Any:
    rest = iter(tensors)

    def build(part: Any) -> Any:
        if part is None:
            return next(rest)
        if isinstance(part, Constant):
            return part.value
        values = tuple(map(build, part.values))
        if part.kind is tuple or part.kind is list:
            return part.kind(values)
        named = dict(zip(part.keys, values, strict=True))
        return named if part.kind is dict else part.kind(**named)

    return build(node)


class Call:
    """The arguments of a call, with tensors of its own: where a graph reads them."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors, self.tree = flatten((args, kwargs), "an argument of a layer")
        # the recorded ones would keep their autograd graph alive, which belongs to a stream that is not captured
        self.tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]

    def difference(self, tensors: Sequence[Tensor], tree: Node, grad: bool) -> str:
        """What another call's arguments do not share with these, "" if nothing. `grad`: whether gradients are on."""
        if tree != self.tree:
            theirs, ours = (fill(t, itertools.repeat("a tensor")) for t in (tree, self.tree))
            return f"the arguments are {theirs}, and were {ours}"
        for i, (x, sample) in enumerate(zip(tensors, self.tensors, strict=True)):
            if _facts(x) != _facts(sample) or (grad and x.requires_grad != sample.requires_grad):
                return f"tensor {i} of the arguments is {_said(x)}, and was {_said(sample)}"
        return ""


def _facts(x: Tensor) -> tuple:
    return x.shape, x.dtype, x.device


def _said(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device} with requires_grad={x.requires_grad}"


def _conditions() -> dict[str, Any]:
    autocast = torch.is_autocast_enabled("cuda")
    return {
        "TP-invariant mode": is_tp_invariant_mode_enabled(),
        "autocast": torch.get_autocast_dtype("cuda") if autocast else None,
    }


class Turns:
    """Whose activations are there. Graphs captured in a row share memory: as they come in the order of the capture, a
    later one's forward, and an earlier one's backward, may write where the layers after it had theirs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._there: dict[int, int] = {}  # of a layer, the forward whose activations it holds
        self._forwards = 0

    def forward(self, index: int, grad: bool) -> int:
        self._lose(index)
        self._forwards += 1
        if grad:
            self._there[index] = self._forwards
        return self._forwards

    def backward(self, index: int, number: int) -> None:
        if self._there.get(index) != number:
            rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
            raise RuntimeError(
                f"{self._names[index]}{rank}: the activations of this backward are gone. It has run before, or since "
                "its forward a graphed layer at or before it has run forward, or one before it backward, and their "
                "CUDA graphs have place for one pass. Run backward after each forward, layers in order, or call "
                "remove() of what graph_layers returned"
            )
        self._lose(index)

    def _lose(self, index: int) -> None:
        for other in [i for i in self._there if i >= index]:
            del self._there[other]


class _Enter(torch.autograd.Function):
    """Passes tensors on; their gradients are copied, as the graph's next replay overwrites its own."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.clone() for grad in grads)


class _Leave(torch.autograd.Function):
    """Copies of what the graph returns; backward makes sure that its activations are still there."""

    @staticmethod
    def forward(
        ctx: Any, turns: Turns, index: int, number: int, differentiable: Sequence[bool], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.turn = turns, index, number
        copies = tuple(out.clone() for out in outputs)
        ctx.mark_non_differentiable(*(c for c, is_one in zip(copies, differentiable, strict=True) if not is_one))
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        turns, index, number = ctx.turn
        turns.backward(index, number)
        return None, None, None, None, *grads


class GraphedForward:
    """In the place of a layer's forward.

    Raises:
        ValueError: other arguments, mode, autocast or parameters than at the capture; says which.
        TypeError: an argument that cannot be part of a graph.
        RuntimeError: in backward, see `Turns`.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        index: int,
        turns: Turns,
        call: Call,
        replay: Callable[..., Any],
        output_tree: Node,
        differentiable: Sequence[bool],
    ) -> None:
        self._layer, self._forward, self._patched = layer, layer.forward, layer.__dict__.get("forward")
        self._name, self._index, self._turns = name, index, turns
        self._call, self._replay = call, replay
        self._output_tree, self._differentiable = output_tree, differentiable
        self._conditions = _conditions()
        self._places = [(module, key) for module in layer.modules() for key in module._parameters]
        self._parameters = self._parameters_now()
        self._trained = [p for p in layer.parameters() if p.requires_grad]

    def restore(self, layer: nn.Module) -> None:
        if self._patched is None:
            del layer.forward
        else:
            layer.forward = self._patched

    def _parameters_now(self) -> list[tuple]:
        """Of each place its parameter as a graph knows it."""
        held = (module._parameters[key] for module, key in self._places)
        return [() if p is None else (id(p), p.data_ptr(), p.requires_grad) for p in held]

    def _difference(self, tensors: Sequence[Tensor], tree: Node, grad: bool) -> str:
        for name, now in _conditions().items():
            if now != self._conditions[name]:
                return f"{name} is {now}, and was {self._conditions[name]}"
        parameters = self._parameters_now()
        if parameters != self._parameters:
            of = [mine != now for mine, now in zip(self._parameters, parameters, strict=True)].index(True)
            return f"the parameter {self._places[of][1]} is another, lies elsewhere, or has another requires_grad"
        return self._call.difference(tensors, tree, grad)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._layer.training or is_capturing():
            return self._forward(*args, **kwargs)
        tensors, tree = flatten((args, kwargs), f"an argument of {self._name}")
        grad = torch.is_grad_enabled()
        problem = self._difference(tensors, tree, grad)
        if problem:
            rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
            raise ValueError(
                f"{self._name}{rank} is a CUDA graph of another call: {problem}. Call it as it was captured, or "
                "remove() what graph_layers returned and capture anew"
            )
        trained = self._trained
        number = self._turns.forward(self._index, grad)
        if not grad:
            outputs = [out.clone() for out in self._replay(*tensors, *trained)]
            return fill(self._output_tree, outputs)
        wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
        entered = _Enter.apply(*(tensors[i] for i in wanted), *trained)
        for i, x in zip(wanted, entered, strict=False):
            tensors[i] = x
        outputs = self._replay(*tensors, *entered[len(wanted) :])
        copies = _Leave.apply(self._turns, self._index, number, self._differentiable, *outputs)
        return fill(self._output_tree, copies)
