"""Checks along the autograd graph that every gradient of a tensor-parallel model will be complete.

In a tensor-parallel model a value is either whole, the same on every rank, or a part: of the features, between a
column-parallel layer and the next row-parallel one, or of the tokens, under sequence parallelism. If an operation
combines a whole value with a part (a learned scale times this rank's heads), the whole value's gradient is one summand;
the others are on other ranks, and nothing adds them. The forward shows no error. Only this library's layers may combine
a whole value with a part, because their backward completes the gradient. So the rule for each node is:

    whole and part -> error, unless the node completes the gradient (a column-parallel layer, a norm of heads)
    part, or nothing that needs a gradient -> part
    whole -> whole; the output of a gather, or of a row-parallel layer: whole

The rule applies to every parameter and activation, in any module. It needs no arithmetic and no collective, only a walk
over the nodes of one forward. What autograd's graph does not show counts as unknown and is never an error: a compiled
or captured part of the model (with backend="eager" it shows this library's operators alone), a part under a reentrant
checkpoint, results of torch's own collectives, and parameters that replace the model's own (FSDP's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.bits import leaves
from ..core.torch_private import function_of
from ..functional import experts, linear, norm, regions, stock
from ..functional.cross_entropy import _CrossEntropy
from ..functional.linear_cross_entropy import _Head
from ..functional.rotary_embedding import Rotation
from ..layers.parameters import named_shard_specs
from ..layers.vocab_embedding import _VocabEmbedding

WHOLE, PART, UNKNOWN = "whole", "part", "unknown"

# For an autograd function: (node, states of its inputs) -> the state of its output; None if the general rule applies.
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
    norm.AddNorm: lambda node, states: PART if node.call.sharding.world > 1 else None,
    regions._GatherSequence: lambda node, states: WHOLE,
    regions._GatherFeatures: lambda node, states: WHOLE,
    regions._ScatterSequence: lambda node, states: PART,
    regions._ScatterFeatures: lambda node, states: PART,
    regions._ExpandHeads: lambda node, states: PART,
    stock._CopyToRegion: lambda node, states: PART,
    stock._GatherForRegion: lambda node, states: PART,
    stock._ReduceFromRegion: lambda node, states: WHOLE,
    stock._ReduceScatterFromRegion: lambda node, states: PART,
    experts.TokenRows: lambda node, states: PART,
    experts.GroupedLinear: lambda node, states: PART,
    experts.Combine: lambda node, states: PART if node.call.sharded else WHOLE,
    _VocabEmbedding: lambda node, states: WHOLE if node.call.sequence_dim is None else PART,
    _CrossEntropy: lambda node, states: WHOLE,
    _Head: lambda node, states: WHOLE,
}
# Their backward adds the gradients of all ranks, or gathers them, so that what they take must be whole.
_OF_WHOLE = (
    regions._ExpandHeads, regions._ScatterSequence, regions._ScatterFeatures, stock._CopyToRegion, linear.ColumnLinear,
    _Head,
)  # fmt: skip
# Their forward gathers the tokens of all ranks, so that what they take must be a part.
_OF_PARTS = (regions._GatherSequence,)
_OPAQUE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")  # torch's nodes that contain a part of the model
# torch's own collectives that are not autograd functions in Python: operators, whose nodes are named after them, and
# before about torch 2.12 classes in C++.
_COLLECTIVES = ("c10d", "AllGatherIntoTensor", "ReduceScatterTensor", "AllToAllSingle")


def _is_single_rank(node: Any) -> bool:
    """Whether the group of this library's node has one rank, so that nothing is scattered, gathered or completed."""
    holder = getattr(node, "call", node)
    group = getattr(getattr(holder, "shard", holder), "group", None)
    return group is not None and group.size == 1


def _takes_whole(node: Any) -> bool:
    function = _function_of(node)
    gathers = function is linear.ColumnLinear and node.call.sequence_parallel  # the tokens of its input by itself
    return function in _OF_WHOLE and not gathers and not _is_single_rank(node)


def _function_of(node: Any) -> Any:
    """The autograd function in Python whose node this is, or None."""
    function = function_of(node)
    return getattr(function, "of_plain", function)


def _by_rule(node: Any, states: list[str]) -> str | None:
    """The state of a node's output by what is known of its kind; None where the general rule holds."""
    function = _function_of(node)
    if function in _RULES:
        return None if _is_single_rank(node) else _RULES[function](node, states)
    place = getattr(function, "__module__", "")
    unknown = (
        place.startswith("torch.distributed.")  # also what FSDP puts around a module's inputs, several through one node
        or place in ("tp_invariant.graphs.capture", "tp_invariant.graphs.graphed_call", "tp_invariant.core.compiled")
        or type(node).__name__ in _OPAQUE
        or any(name in node.name() for name in _COLLECTIVES)
        or getattr(function, "sums_over_ranks", False)
    )
    return UNKNOWN if unknown else None


def _node_of(x: Tensor) -> Any:
    """x's node in the graph; for a leaf, the node that accumulates its gradient."""
    return x.grad_fn if x.grad_fn is not None else x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _id_of(parameter: Any) -> int:
    """That of the model's parameter, also for one of its aliases (layers/sequence_chunks.py)."""
    alias_of: int | None = getattr(parameter, "alias_of", None)
    return id(parameter) if alias_of is None else alias_of


class IncompleteGradient(ValueError):
    """A gradient would be one summand of a sum over ranks that nothing adds."""


def _given(node: Any, states: Mapping[Any, Any]) -> list[str | None]:
    """The states of a node's inputs; None for one that needs no gradient. Of a node with a state for each of its
    outputs (Rotation, whose outputs do not meet: q may be a part and k whole), that of the output."""
    given = []
    for before, output in node.next_functions:
        state = None if before is None else states.get(before)
        given.append(state[output] if isinstance(state, tuple) else state)
    return given


def _inputs(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions if before is not None]


def incomplete_gradients(
    outputs: Iterable[Tensor], sharded: Mapping[int, bool], names: Mapping[int, str], inputs: Iterable[Tensor] = ()
) -> list[str]:
    """What is whole and meets a part in the graph of `outputs`, or is taken for the other kind, one line each.

    [] where every gradient is complete.

    Args:
        sharded: by the id of a parameter, whether ranks hold parts of it; others are unknown.
        names: by the id of a parameter, its name.
        inputs: whole tensors, at which the graph is taken to begin.
    """
    states: dict[Any, Any] = {_node_of(x): WHOLE for x in inputs if x.requires_grad}
    meetings: dict[tuple[str, ...], str] = {}
    parts: dict[str, None] = {}  # lines, in their order
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
        parameter = getattr(node, "variable", None)  # AccumulateGrad's
        if parameter is not None:
            known = sharded.get(_id_of(parameter))
            states[node] = UNKNOWN if known is None else PART if known else WHOLE
            continue
        of_inputs = _given(node, states)
        if _function_of(node) is Rotation:
            states[node] = tuple(state or UNKNOWN for state in of_inputs[:2])
            continue
        given = [state for state in of_inputs if state is not None]
        if _takes_whole(node) and of_inputs[0] == PART:
            parts.setdefault(f"this rank's part of the activations: taken as the same on every rank in {node.name()}")
        if WHOLE in given and _function_of(node) in _OF_PARTS and not _is_single_rank(node):
            parts.setdefault(f"a whole activation: taken as this rank's part of the tokens in {node.name()}")
        state = _by_rule(node, given)
        if state is None:
            state = _if_any(given)
            if PART in given and WHOLE in given and UNKNOWN not in given:
                for other, kind in zip(before, given, strict=True):
                    if kind == WHOLE:
                        owners = _whole_parameters(other, states, names)
                        meetings.setdefault(tuple(owners), node.name())
        states[node] = state
    return [*(_line(owners, name) for owners, name in meetings.items()), *parts]


def _whole_parameters(node: Any, states: Mapping[Any, str], names: Mapping[int, str]) -> list[str]:
    """The names of the whole parameters that this node's value is made of, in the order in which they are met."""
    owners, stack, seen = [], [node], {node}
    while stack:
        node = stack.pop()
        name = names.get(_id_of(getattr(node, "variable", None)))
        owners += [] if name is None else [name]
        for other in _inputs(node):
            state = states.get(other)
            if other not in seen and (state == WHOLE or (isinstance(state, tuple) and WHOLE in state)):
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


HOW_TO_FIX = (
    "Their gradients would be parts of sums over ranks that nothing adds up. A norm of each head has the style "
    "'replicated_with_grad_allreduce' (give Part its heads and heads_dim). Anything else belongs outside the sharded "
    "region, before its column-parallel or after its row-parallel layer; or give the layer before it the style "
    "'colwise_gather_output' and the one after it 'rowwise_split_input', so that it gets all features. Declare "
    "sums_over_ranks = True in an autograd function of yours that sums its gradients over the ranks."
)


def check_gradient_flow(model: nn.Module, outputs: Any, inputs: Any = ()) -> bool:
    """Looks for incomplete gradients in the autograd graph of `outputs`, a forward of `model` for whole `inputs`.

    Returns:
        Whether there was a graph.

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
        raise IncompleteGradient(f"{type(model).__name__} would get wrong gradients:\n{lines}\n{HOW_TO_FIX}")
    return True


def check_mask(group: Group, node: Any, name: str, *, cp_group: Group | None = None) -> None:
    """The CheckMask of functional/attention_choice.py for a model over `group`, and over `cp_group`.

    Ranks that draw the same random numbers draw one mask for what is whole, but each the same one for its part.
    """
    if cp_group is not None and cp_group.size > 1:
        raise ValueError(
            f"{name} on rank {cp_group.rank} of {cp_group.size} of cp_group acts on this rank's part of the tokens: "
            "its mask would depend on the context parallel degree. Set p to 0 there, or call model.eval()"
        )
    if group.size > 1 and (node is None or _is_part(node)):
        raise ValueError(
            f"{name} on rank {group.rank} of {group.size} acts on this rank's part of the activations"
            f"{', or may, as without gradients nothing shows it' if node is None else ''}: its mask would depend on "
            "the degree. Set p to 0 there, call model.eval(), or use dropout where activations are whole, as before a "
            "column-parallel layer and after a row-parallel one without sequence_parallel"
        )


def _is_part(node: Any) -> bool:
    """Whether a node's value is a part, by the nearest nodes before it whose kind says so."""
    nodes, seen = [node], set[Any]()
    while nodes:
        node = nodes.pop()
        rule = None if node in seen or _is_single_rank(node) else _RULES.get(_function_of(node))
        state = rule and rule(node, [UNKNOWN])
        if state == PART:
            return True
        if node not in seen and state != WHOLE:
            nodes += _inputs(node)
        seen.add(node)
    return False


class FirstForward:
    """A forward hook of a whole model that checks the first forward with an autograd graph, and then removes itself.

    All ranks have the same graph and so get the same error, without communication.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        if group.size > 1:  # alone, every gradient is complete
            self.handle = model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if check_gradient_flow(model, output, (args, kwargs)):
            self.handle.remove()
