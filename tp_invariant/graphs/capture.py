"""Layers as CUDA graphs: a forward or a backward is one launch for the host, and any eager code may stand between them.

A layer of a few thousand tokens takes Python longer than the GPU. `graph_layers` captures each layer's forward and
backward by torch.cuda.make_graphed_callables, for which torch and Transformer Engine have the same use, and adds:

    arguments   any of tensors, numbers, strings and None, by position or name, as one forward of the model passes them
    weights     a gather that a layer's graph starts ahead ends in it: `weight_cache.enter` says where a graph begins
    refusals    a graph repeats what was captured, to the same addresses. So what it would get wrong silently is an
                error, here or in graphed_call.py
    copies      what is returned, and all gradients, are copies, which no later replay overwrites
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..core.dtensors import is_dtensor, local_of, placed_like
from ..core.torch_private import function_modes, version_of
from ..gemm.weights import weight_cache
from .arguments import Call, fill, flatten, reached_leaves
from .checks import check_same, groups_of, on_gpu, problem_with, raise_on_all_ranks
from .graphed_call import ActivationOwnership, Captured, GraphedForward, changed_condition, conditions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MOST_FORWARDS = 16


class GraphedLayers:
    """The layers that `graph_layers` has captured. `remove()` restores them."""

    def __init__(self, forwards: Sequence[GraphedForward], cuda_graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        self._forwards, self._cuda_graphs = list(forwards), list(cuda_graphs)

    def remove(self) -> None:
        """Waits for the GPU and ends the graphs. What they returned can have no backward afterwards.

        Call it before torch.distributed.destroy_process_group, which waits for graphs that hold NCCL's kernels.
        """
        if self._cuda_graphs:
            torch.cuda.synchronize()
        for forward in self._forwards:
            forward.remove()
        for graph in self._cuda_graphs:  # a result that is still referred to would keep its graph
            graph.reset()
        self._forwards.clear()
        self._cuda_graphs.clear()
        gc.collect()  # torch keeps each graph in a class made for it, and classes refer to themselves


def _cuda_graphs() -> list[torch.cuda.CUDAGraph]:
    """Those of this process. torch.cuda.make_graphed_callables does not return the ones that it makes."""
    return [x for x in gc.get_objects() if type(x) is torch.cuda.CUDAGraph]


def graph_layers(
    layers: Sequence[nn.Module],
    forward: Callable[[], Any] | Sequence[Callable[[], Any]],
    *,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    other_calls: Literal["error", "eager"] = "error",
) -> GraphedLayers:
    """Makes the forward and the backward of each layer a CUDA graph, in place, with the bits of the layers as they are.

        graphs.graph_layers(model.model.layers, lambda: model(**batch, use_cache=False))    # then train as before

    Collective over the layers' tensor-parallel groups; before DistributedDataParallel wraps the model. Call it under
    the mode and autocast of training (autocast with cache_enabled=False), and the layers on one stream. Later calls
    need the shapes of these; `forward` may be several functions, one for each shape. In eval(), and while another graph
    is captured, a layer runs as it was. Python inside a layer no longer runs: what is set later does not reach it (a
    layer's gemm_fn or owner_map, the default gemm_fn, hooks on modules inside it), and numbers that it draws on the CPU
    (LayerDrop) repeat. Where a tensor or parameter is used by several layers, or in a layer and outside, its
    gradient is summed layer by layer first: the same at every degree, but it may differ from the uncaptured layers'.

    Args:
        layers: in the order in which forward calls them, each once; in train(), all on the current GPU.
        forward: runs the model once as training does, with the same shapes; its results are dropped. Arguments of a
            layer are tensors, numbers, strings and None, and tuples, lists, dicts and frozen dataclasses of them. Or up
            to 16 such functions, that of the largest shapes first: a later call has the graphs of the one whose
            arguments it has, so each layer's must differ. They share the memory of activations, so that backward comes
            before a forward of another.
        num_warmup_iters: passes of each layer before its capture; at least 2.
        allow_unused_input: whether there may be arguments and parameters that want a gradient and get none.
        other_calls: what a call with other arguments is: an error, or eager, as the layer was; the log says so once.

    Memory: the activations of all layers, as in any forward of them, of several functions about those of the largest;
    and besides, for each function, each layer's arguments, results and gradients. Random generators (torch's and
    Python's) and the layers' buffers are left as they were.

    Raises:
        ValueError: layers that cannot be captured, or that forward calls otherwise, or ranks that differ; says which,
            and why.
        TypeError: an argument that is none of the above.
        RuntimeError: from the capture, as where a layer waits for the GPU (`.item()`).
    """
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.ModuleList, nn.Sequential)):
        raise TypeError(f"layers is a {type(layers).__name__}: it must be a sequence of modules, [layer] for one")
    layers = list(layers)
    forwards = list(forward) if isinstance(forward, Sequence) else [forward]
    names = [f"layers[{i}] ({type(layer).__name__})" for i, layer in enumerate(layers)]
    groups = groups_of(layers)
    problems = [problem_with(layer, name) for layer, name in zip(layers, names, strict=True)]
    inside = [id(module) for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()]
    if any(inside.count(id(layer)) > 1 for layer in layers):
        problems.append("a layer stands in `layers` twice, or inside another: each has one graph")
    if not layers:
        problems.append("there are no layers")
    if num_warmup_iters < 2:
        problems.append(f"num_warmup_iters={num_warmup_iters}: at least 2, in which the order of weights is learnt")
    if not 1 <= len(forwards) <= _MOST_FORWARDS:
        problems.append(f"forward is {len(forwards)} functions: 1 to {_MOST_FORWARDS}, as each has graphs of its own")
    if other_calls not in ("error", "eager"):
        problems.append(f"other_calls={other_calls!r}: 'error' or 'eager'")
    if not torch.is_grad_enabled():
        problems.append("gradients are off: torch.cuda.graph captures a forward alone")
    if conditions()["TP_INVARIANT_CHECK"]:
        problems.append("TP_INVARIANT_CHECK=1 compares every call, which a replay cannot: unset it")
    raise_on_all_ranks("; ".join(filter(None, problems)), groups, "graph_layers cannot capture")
    options = {
        "layers": names, "the number of functions": len(forwards), "num_warmup_iters": num_warmup_iters,
        "allow_unused_input": allow_unused_input, "other_calls": other_calls,
    }  # fmt: skip
    check_same(options, groups)
    captured: list[list[Captured]] = []  # of each function, of each layer
    pool = torch.cuda.graph_pool_handle()
    earlier_graphs = _cuda_graphs()
    with _as_before(layers) as reassigned:
        for one in forwards:
            recorded, problem = _record(layers, names, one)
            if not problem:
                problem = next(filter(None, (_alike(recorded, before) for before in captured)), "")
            raise_on_all_ranks(
                problem, groups, "graph_layers: forward must call each layer once, in order, as graph_layers is called"
            )
            check_same({f"the tensors that {call.name} gets": call.call.facts() for call in recorded}, groups)
            steps = [_Step(call, allow_unused_input) for call in recorded]
            with _ahead_in_graphs(), _parameter_replacements(layers) as (parameters, places):
                for step, own in zip(steps, places, strict=True):
                    step.places = own
                versions = [[version_of(t) for t in step.call.tensors] for step in steps]
                replays = torch.cuda.make_graphed_callables(
                    tuple(steps),
                    tuple((*step.call.tensors, *mine) for step, mine in zip(steps, parameters, strict=True)),
                    num_warmup_iters=num_warmup_iters,
                    allow_unused_input=allow_unused_input,
                    pool=pool,
                )
            problems = [step.written(before) for step, before in zip(steps, versions, strict=True)]
            problems += reassigned()
            raise_on_all_ranks("; ".join(filter(None, problems)), groups, "graph_layers cannot capture")
            captured.append(
                [
                    Captured(step.call, replay, step.output_tree, step.differentiable)
                    for step, replay in zip(steps, replays, strict=True)
                ]
            )
    ownership, eager_else = ActivationOwnership(names), other_calls == "eager"
    graphed = [
        GraphedForward(layer, names[index], index, ownership, [one[index] for one in captured], eager_else)
        for index, layer in enumerate(layers)
    ]
    for layer, replacement in zip(layers, graphed, strict=True):
        layer.forward = replacement
    own_graphs = [graph for graph in _cuda_graphs() if all(graph is not earlier for earlier in earlier_graphs)]
    return GraphedLayers(graphed, own_graphs)


def _alike(recorded: Sequence[_Recorded], captured: Sequence[Captured]) -> str:
    """Which layer gets arguments with which it was captured, "" if none does: a call of it is of one function alone."""
    for repeated, earlier in zip(recorded, captured, strict=True):
        if not earlier.call.difference(repeated.call.tensors, repeated.call.tree, True):
            return f"two functions call {repeated.name} with the same arguments"
    return ""


# --- one layer ------------------------------------------------------------------------------------------------------


class _Recorded:
    """A call of a layer in forward: its arguments after the layer's own hooks, and the conditions of the call."""

    def __init__(
        self, layer: nn.Module, name: str, args: tuple, kwargs: dict[str, Any], outside: dict[str, Any]
    ) -> None:
        self.layer, self.name = layer, name
        self.call = Call(args, kwargs, f"an argument of {name}")
        self.modes = function_modes()  # as entered by hooks of attention_choice
        problems = [changed_condition(conditions(), outside)]
        problems += [f"it gets a tensor on {x.device}" for x in self.call.tensors if not on_gpu(x)]
        if not torch.is_grad_enabled():
            problems.append("gradients are off")
        self.problem = "; ".join(f"{name}: {text}" for text in problems if text)


class _Step:
    """A layer as a function of plain tensors only: those of its arguments, then its parameters, which it ignores."""

    def __init__(self, recorded: _Recorded, allow_unused: bool) -> None:
        self._forward, self._name, self._modes = recorded.layer.forward, recorded.name, recorded.modes
        self._parameters = [key for key, p in recorded.layer.named_parameters() if p.requires_grad]
        self._allow_unused, self._checked = allow_unused, False
        self.call = recorded.call
        self.places: list[_Place] = []
        self.output_tree: Any = None
        self.differentiable: list[bool] = []  # which of the tensors that it returns

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = fill(self.call.tree, tensors[: len(self.call.tensors)])
        for place in self.places:
            place.renew()
        weight_cache.enter((id(self), "forward"))
        with ExitStack() as modes:
            active = list(map(id, function_modes()))
            for mode in self._modes:
                if id(mode) not in active:
                    modes.enter_context(mode)
            returned = self._forward(*args, **kwargs)
        outputs, self.output_tree = flatten(returned, f"what {self._name} returns")
        self.differentiable = [out.requires_grad for out in outputs]
        if not self._checked:
            self._check(tensors, outputs)
            self._checked = True
        begun = iter(_Begin.apply(id(self), *(out for out in outputs if out.requires_grad)))
        return tuple(next(begun) if out.requires_grad else out for out in outputs)

    def _check(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if not any(out.requires_grad for out in outputs):
            raise ValueError(f"graph_layers: nothing that {self._name} returns wants a gradient")
        reached, known = {id(x): x for x in reached_leaves(outputs)}, set(map(id, tensors))
        for key, x in reached.items():
            if key not in known:
                raise ValueError(
                    f"graph_layers: {self._name} computes with a tensor of shape {tuple(x.shape)} that wants a "
                    "gradient and is neither its argument nor its parameter, so it would get none: make it one of them"
                )
        names = [f"tensor {i} of the arguments" for i in range(len(self.call.tensors))] + self._parameters
        unused = [name for name, x in zip(names, tensors, strict=True) if x.requires_grad and id(x) not in reached]
        if unused and not self._allow_unused:
            raise ValueError(
                f"graph_layers: {self._name} makes no use of {', '.join(unused)}, which want a gradient: turn that off "
                "for them, or pass allow_unused_input=True"
            )

    def written(self, before: Sequence[int]) -> str:
        """The argument that the layer writes to, "" if none: a graph would write to its own copy of it."""
        for i, (x, version) in enumerate(zip(self.call.tensors, before, strict=True)):
            if version_of(x) != version:
                return f"{self._name} writes to tensor {i} of its arguments"
        return ""


class _Begin(torch.autograd.Function):
    """The identity in forward; in backward it runs first and marks where the graph begins."""

    @staticmethod
    def forward(ctx: Any, step: int, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_cache.enter((ctx.step, "backward"))
        return None, *grads


def _record(
    layers: Sequence[nn.Module], names: Sequence[str], forward: Callable[[], Any]
) -> tuple[list[_Recorded], str]:
    """The calls of layers in forward, in order, and the problems with them."""
    seen: list[_Recorded] = []
    outside = conditions()
    by_id = {id(layer): name for layer, name in zip(layers, names, strict=True)}

    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append(_Recorded(layer, by_id[id(layer)], args, kwargs, outside))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    called = [call.name for call in seen]
    if called != list(names):
        return seen, f"it called {', '.join(called) or 'none of them'}"
    return seen, "; ".join(call.problem for call in seen if call.problem)


# --- around the capture ---------------------------------------------------------------------------------------------


@contextmanager
def _ahead_in_graphs() -> Iterator[None]:
    """Gathers weights inside the graphs: a replay would read the values that a kept weight had at the capture."""
    before = weight_cache.keep, weight_cache.ahead_in_graphs, weight_cache.passes
    weight_cache.clear()
    weight_cache.keep, weight_cache.ahead_in_graphs = 0, weight_cache.ahead
    weight_cache.passes = sys.maxsize  # each layer's warm-up takes several
    try:
        yield
    finally:
        weight_cache.clear()
        weight_cache.keep, weight_cache.ahead_in_graphs, weight_cache.passes = before


class _Place(NamedTuple):
    """Where a layer has a parameter that is a DTensor: it computes with one that is made of a plain leaf at each call.

    A graph repeats what plain tensors do: it gets the leaf, and gives the leaf's gradient.
    """

    names: list[tuple[nn.Module, str]]
    leaf: Tensor
    local: Tensor  # the leaf outside of autograd: always of the same memory, by which the weight cache knows a weight
    like: DTensor

    def renew(self) -> None:
        placed: Any = placed_like(self.leaf, self.local, self.like)
        for module, key in self.names:
            module._parameters[key] = placed


@contextmanager
def _parameter_replacements(
    layers: Sequence[nn.Module],
) -> Iterator[tuple[list[tuple[Tensor, ...]], list[list[_Place]]]]:
    """Replaces each trained parameter by a new one with the same memory. Yields those of each layer, as plain leaves.

    Autograd binds a leaf to the stream of an autograd graph that may still be alive (the loss of the previous step),
    and that stream is not captured.
    """
    replacements: dict[int, tuple[nn.Parameter, Tensor]] = {}
    leaves: list[tuple[Tensor, ...]] = []
    dtensors: list[list[_Place]] = []
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    for layer in layers:
        names: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for module in layer.modules():
            for key, p in module._parameters.items():
                if p is not None and p.requires_grad:
                    names.setdefault(id(p), (p, []))[1].append((module, key))
                    before.append((module, key, p))
        for p, _ in names.values():
            if id(p) not in replacements:
                leaf = nn.Parameter(local_of(p).detach())
                leaf.__dict__.update({} if is_dtensor(p) else p.__dict__)
                replacements[id(p)] = leaf, leaf.detach()
        leaves.append(tuple(replacements[id(p)][0] for p in layer.parameters() if p.requires_grad))
        dtensors.append([_Place(where, *replacements[key], p) for key, (p, where) in names.items() if is_dtensor(p)])
    for module, key, was in before:
        if not is_dtensor(was):
            module._parameters[key] = replacements[id(was)][0]
    try:
        yield leaves, dtensors
    finally:
        for module, key, was in before:
            module._parameters[key] = was


@contextmanager
def _as_before(layers: Sequence[nn.Module]) -> Iterator[Callable[[], list[str]]]:
    """Restores random generators and buffers at the end. Yields a function that names replaced buffers."""
    modules = [(key, module) for layer in layers for key, module in layer.named_modules()]
    places = [(module, key, f"{of}.{key}") for of, module in modules for key in module._buffers]
    buffers = [(*place, place[0]._buffers[place[1]]) for place in places]
    values = [None if buffer is None else buffer.clone() for *_, buffer in buffers]
    drawn = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []

    def reassigned() -> list[str]:
        others = [name for module, key, name, buffer in buffers if module._buffers.get(key) is not buffer]
        return [f"a layer makes its buffer {name} another tensor: write into it instead" for name in others]

    with torch.random.fork_rng(devices=devices):
        try:
            yield reassigned
        finally:
            random.setstate(drawn)
            with torch.no_grad():
                for (module, key, _, buffer), before in zip(buffers, values, strict=True):
                    module._buffers[key] = buffer
                    if buffer is not None and before is not None and not torch.equal(buffer, before):
                        buffer.copy_(before)
