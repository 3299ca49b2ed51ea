"""A layer's arguments in the form that a CUDA graph needs: tensors at fixed addresses, and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class Node(NamedTuple):
    """A tuple, list, dict or dataclass without its tensors."""

    kind: type
    keys: tuple
    values: tuple


class Slot(NamedTuple):
    """The position of a tensor: its index. All positions of the same tensor have the same index."""

    number: int


@dataclasses.dataclass(frozen=True)
class Constant:
    kind: type  # compared too, because True, 1 and 1.0 are equal
    compared: Any  # float.hex() of a float, because 0.0 equals -0.0, and a NaN does not equal itself
    value: Any = dataclasses.field(compare=False)


def flatten(tree: Any, what: str) -> tuple[list[Tensor], Node]:
    """The tensors in nested tuples, lists, dicts and frozen dataclasses, each once, and the structure, for `fill`.

    Raises:
        TypeError: a leaf that is neither a tensor nor a constant.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def walk(x: Any) -> Any:
        kind = type(x)
        if isinstance(x, Tensor):
            number = numbers.setdefault(id(x), len(tensors))
            if number == len(tensors):
                tensors.append(x)
            return Slot(number)
        if kind is tuple or kind is list:
            return Node(kind, (), tuple(map(walk, x)))
        if kind is dict:
            return Node(kind, tuple(x), tuple(map(walk, x.values())))
        if "__dataclass_params__" in vars(kind) and kind.__dataclass_params__.frozen:
            fields = dataclasses.fields(kind)
            keys = tuple(field.name for field in fields if field.metadata.get("in_graphs", True))
            if set(getattr(x, "__dict__", ())) <= {field.name for field in fields}:
                return Node(kind, keys, tuple(walk(getattr(x, key)) for key in keys))
        if isinstance(x, _CONSTANTS):
            return Constant(kind, x.hex() if isinstance(x, float) else x, x)
        raise TypeError(
            f"{what}: a {kind.__name__} cannot be part of a CUDA graph; allowed: tensors, numbers, strings, dtypes, "
            "devices and None, in tuples, lists, dicts and frozen dataclasses (a cache of keys and values: pass "
            "use_cache=False to the model)"
        )

    node = walk(tree)
    return tensors, node


def fill(node: Node, tensors: Sequence[Any]) -> Any:
    """`node` with these tensors at its slots."""

    def build(part: Any) -> Any:
        if isinstance(part, Slot):
            return tensors[part.number]
        if isinstance(part, Constant):
            return part.value
        values = tuple(map(build, part.values))
        if part.kind is tuple or part.kind is list:
            return part.kind(values)
        if part.kind is dict:
            return dict(zip(part.keys, values, strict=True))
        made = object.__new__(part.kind)  # copies the fields without calling __init__, which may change them
        for key, value in zip(part.keys, values, strict=True):
            object.__setattr__(made, key, value)
        return made

    return build(node)


def flatten_call(args: tuple, kwargs: dict[str, Any], what: str) -> tuple[list[Tensor], Node]:
    return flatten((args, dict(sorted(kwargs.items()))), what)  # the order of keyword arguments has no meaning


class Call:
    """The arguments of a call, with copies of their tensors, from which a graph reads."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], what: str) -> None:
        tensors, self.tree = flatten_call(args, kwargs, what)
        # the recorded tensors would keep their autograd graph alive, which belongs to a stream that is not captured
        self.tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]

    def difference(self, tensors: Sequence[Tensor], tree: Node, grad: bool) -> str:
        """How another call's arguments differ from these, "" if they do not. `grad`: whether grad mode is on."""
        if tree != self.tree:
            names = [f"tensor {i}" for i in range(max(len(tensors), len(self.tensors)))]
            theirs, ours = (fill(t, names) for t in (tree, self.tree))
            return f"the arguments are {theirs}, and were {ours}"
        for i, (x, sample) in enumerate(zip(tensors, self.tensors, strict=True)):
            same = x.shape == sample.shape and x.dtype == sample.dtype and x.device == sample.device
            if not same or (grad and x.requires_grad != sample.requires_grad):
                return f"tensor {i} of the arguments is {describe_tensor(x)}, and was {describe_tensor(sample)}"
        return ""

    def facts(self) -> list[tuple]:
        """The properties of the tensors that must be equal on all ranks."""
        return [(str(x.dtype), tuple(x.shape), x.requires_grad) for x in self.tensors]


def describe_tensor(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device} with requires_grad={x.requires_grad}"


def reached_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors whose gradients a backward from `outputs` computes."""
    nodes = [out.grad_fn for out in outputs if out.grad_fn is not None]
    leaves = [out for out in outputs if out.grad_fn is None and out.requires_grad]
    seen: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        nodes += following
    return leaves
