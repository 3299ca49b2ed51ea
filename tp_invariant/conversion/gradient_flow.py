"""Whether every gradient of a tensor-parallel model will be complete: found along the graph that autograd made.

In a tensor-parallel model a value is either whole, the same on every rank, or this rank's part: of the features from a
column-parallel layer to the row-parallel one after it, of the tokens under sequence parallelism. Where something whole
meets a part (a learned scale times this rank's heads), the gradient that comes back to it is a part of a sum, whose
other parts are on other ranks, and nobody adds them up. Forward shows nothing of it. The layers of this library are
where a whole value may meet a part, since their backward completes the gradient. So the rule, for each node:

    whole and part -> error, unless the node is one of ours that completes it (a column-parallel layer, a norm of heads)
    part, or nothing that needs a gradient -> part
    whole -> whole; out of a gather, or a row-parallel layer: whole

It holds for every parameter and every activation, whatever modules they are in, and costs no arithmetic and no
collective: a walk over the nodes of one forward. What autograd's graph does not show counts as unknown and is never an
error: a compiled or captured part of the model, one under a reentrant checkpoint, what a collective of torch's own has
moved, and parameters that stand in for the model's own (FSDP's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.bits import leaves
from ..functional import linear, norm, regions, stock
from ..functional.cross_entropy import _CrossEntropy
from ..layers.parameters import named_shard_specs
from ..layers.vocab_embedding import _VocabEmbedding

WHOLE, PART, UNKNOWN = "whole", "part", "unknown"

# Autograd functions that say how they leave what they are given. (node, states of its inputs) -> the state of its
# output; None where the general rule holds.
_Rule = Callable[[Any, list[str]], str | None]


def _if_any(states: list[str]) -> str:
    """PART, or else UNKNOWN, where some input is."""
    return PART if PART in states else UNKNOWN if UNKNOWN in states else WHOLE


_RULES: dict[type, _Rule] = {
    linear.ColumnLinear: lambda node, states: PART,
    linear.RowLinear: lambda node, states: PART if node.call.sequence_parallel else WHOLE,
    linear.ReplicatedLinear: lambda node, states: _if_any(states) if node.call.sequence_parallel else None,
    linear.ExpandBias: lambda node, states: PART if node.tokens_sharded else _if_any(states),
    norm.Norm: lambda node, states: PART if node.call.heads_dim is not None or node.call.sharding.world > 1 else None,
    regions._GatherSequence: lambda node, states: WHOLE,
    regions._GatherFeatures: lambda node, states: WHOLE,
    regions._ScatterSequence: lambda node, states: PART,
    regions._ScatterFeatures: lambda node, states: PART,
    stock._CopyToRegion: lambda node, states: PART,
    stock._GatherForRegion: lambda node, states: PART,
    stock._ReduceFromRegion: lambda node, states: WHOLE,
    stock._ReduceScatterFromRegion: lambda node, states: PART,
    _VocabEmbedding: lambda node, states: WHOLE if node.call.sequence_dim is None else PART,
    _CrossEntropy: lambda node, states: WHOLE,
}
_OPAQUE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")  # torch's own, with a part of the model in them
# torch's own collectives where they are no autograd functions in Python: operators, whose nodes are named after them,
# and before torch 2.12 or so classes in C++.
_COLLECTIVES = ("c10d", "AllGatherIntoTensor", "ReduceScatterTensor", "AllToAllSingle")


def _is_alone(node: Any) -> bool:
    """Whether a node of this library is of a group of one rank, where nothing is scattered, gathered or completed."""
    holder = getattr(node, "call", node)
    group = getattr(getattr(holder, "shard", holder), "group", None)
    return group is not None and group.size == 1


def _by_rule(node: Any, states: list[str]) -> str | None:
    """The state of a node's output by what is known of its kind; None where the general rule holds."""
    function = getattr(type(node), "_forward_cls", None)  # of autograd functions in Python
    function = getattr(function, "of_plain", function)
    if function in _RULES:
        return None if _is_alone(node) else _RULES[function](node, states)
    place = getattr(function, "__module__", "")
    unknown = (
        place.startswith("torch.distributed.")  # also what FSDP puts around a module's inputs, several through one node
        or place in ("tp_invariant.graphs.capture", "tp_invariant.graphs.graphed_call")
        or type(node).__name__ in _OPAQUE
        or any(name in node.name() for name in _COLLECTIVES)
        or getattr(function, "sums_over_ranks", False)
    )
    return UNKNOWN if unknown else None


def _node_of(x: Tensor) -> Any:
    """x's node in the graph, of a leaf the one that takes its gradient."""
    return x.grad_fn if x.grad_fn is not None else x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class IncompleteGradient(ValueError):
    """A gradient would be a part of a sum that nobody adds up."""


def _inputs(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions if before is not None]


def _parameter_of(node: Any) -> Tensor | None:
    return getattr(node, "variable", None)  # AccumulateGrad's


def incomplete_gradients(
    outputs: Iterable[Tensor], sharded: Mapping[int, bool], names: Mapping[int, str], inputs: Iterable[Tensor] = ()
) -> list[str]:
    """What is whole and meets a part in the graph of `outputs`, one line each; [] where every gradient is complete.

    Args:
        sharded: by the id of a parameter, whether ranks hold parts of it; others are unknown.
        names: by the id of a parameter, its name.
        inputs: whole tensors, at which the graph is taken to begin.
    """
    states: dict[Any, str] = {_node_of(x): WHOLE for x in inputs if x.requires_grad}
    found: dict[tuple[str, ...], str] = {}
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:  # depth first, a node after its inputs; graphs are deeper than Python's stack
        node, ready = stack.pop()
        if node in states:
            continue
        before = _inputs(node)
        if not ready:
            stack.append((node, True))
            stack += [(other, False) for other in before if other not in states]
            continue
        parameter = _parameter_of(node)
        if parameter is not None:
            known = sharded.get(id(parameter))
            states[node] = UNKNOWN if known is None else PART if known else WHOLE
            continue
        given = [states[other] for other in before]
        state = _by_rule(node, given)
        if state is None:
            state = _if_any(given)
            if PART in given and WHOLE in given and UNKNOWN not in given:
                for other, kind in zip(before, given, strict=True):
                    if kind == WHOLE:
                        owners = _whole_parameters(other, states, names)
                        found.setdefault(tuple(owners), node.name())
        states[node] = state
    return [_line(owners, name) for owners, name in found.items()]


def _whole_parameters(node: Any, states: Mapping[Any, str], names: Mapping[int, str]) -> list[str]:
    """The names of the whole parameters that this node's value is made of, in the order in which they are met."""
    owners, stack, seen = [], [node], {node}
    while stack:
        node = stack.pop()
        parameter = _parameter_of(node)
        if parameter is not None and id(parameter) in names:
            owners.append(names[id(parameter)])
        for other in _inputs(node):
            if other not in seen and states.get(other) == WHOLE:
                seen.add(other)
                stack.append(other)
    return owners


def _line(owners: tuple[str, ...], node: str) -> str:
    if not owners:
        what = "an activation, made of the model's inputs"
    elif len(owners) == 1:
        what = owners[0]
    else:
        more = f" and {len(owners) - 3} more" if len(owners) > 3 else ""
        what = f"an activation, made of {', '.join(owners[:3])}{more}"
    return f"{what}: the same on every rank, and meets this rank's part of the activations in {node}"


HOW_TO_MEND = (
    "Their gradients would be parts of sums over ranks that nobody adds up. A norm of each head has the style "
    "'replicated_with_grad_allreduce' (give Part its heads and heads_dim). Anything else belongs outside of the "
    "sharded region, before its column-parallel or after its row-parallel layer; or the layer before it gets the style "
    "'colwise_gather_output' and the one after it 'rowwise_split_input', and it sees all features. An autograd "
    "function of yours that sums its gradients over the ranks says so by sums_over_ranks = True."
)


def check_gradient_flow(model: nn.Module, outputs: Any, inputs: Any = ()) -> bool:
    """Looks for gradients that would be incomplete, in the graph of what a forward of `model` gave for whole `inputs`.

    Returns:
        Whether there was a graph to look at.

    Raises:
        IncompleteGradient: names each whole parameter, or whole activation, that meets a part.
    """
    tensors = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    if not tensors:
        return False
    sharded: dict[int, bool] = {}
    names: dict[int, str] = {}
    for name, parameter, spec in named_shard_specs(model):
        key = id(parameter)
        sharded[key] = sharded.get(key, False) or (spec.dim is not None and spec.group.size > 1)
        names.setdefault(key, name)
    given = [leaf for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    if problems := incomplete_gradients(tensors, sharded, names, given):
        lines = "\n".join(f"  {line}" for line in problems)
        raise IncompleteGradient(f"{type(model).__name__} would get wrong gradients:\n{lines}\n{HOW_TO_MEND}")
    return True


class FirstForward:
    """A forward hook of a whole model that checks the first forward which has a graph, and then goes away.

    All ranks make the same graph, so all get the same error, and nothing is exchanged.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.handle: Any = None
        if group.size > 1:  # alone, every gradient is complete
            self.handle = model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if check_gradient_flow(model, output, (args, kwargs)):
            self.handle.remove()
