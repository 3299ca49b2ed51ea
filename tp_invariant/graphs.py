"""Layers as CUDA graphs: a forward or a backward is one launch for the host, and any eager code may stand between them.

A layer of a few thousand tokens takes Python longer than the GPU. `graph_layers` captures each layer's forward and
backward by torch.cuda.make_graphed_callables, for which torch and Transformer Engine have the same use, and adds:

    arguments   any of tensors, numbers, strings and None, by position or name, as one forward of the model passes them
    weights     a gather that a layer's graph starts ahead ends in it: `weight_cache.enter` says where a graph begins
    refusals    a graph repeats what was captured, to the same addresses. So what it would get wrong silently is an
                error here (graphed_call.py): other shapes, modes, autocast, parameters, or a backward whose activations
                another forward has overwritten
    copies      what is returned, and all gradients, are copies, which no later replay overwrites
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import Group
from .graphed_call import Call, GraphedForward, Turns, fill, flatten
from .weight_cache import weight_cache
from .wire import gather_objects


class GraphedLayers:
    """The layers that `graph_layers` has captured. `remove()` makes them as they were."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]

    def remove(self) -> None:
        """Frees the graphs and their memory, once nothing that they returned awaits its backward."""
        for layer in filter(None, (ref() for ref in self._layers)):
            if isinstance(layer.__dict__.get("forward"), GraphedForward):
                layer.__dict__["forward"].restore(layer)
        self._layers.clear()


def graph_layers(
    layers: Sequence[nn.Module],
    forward: Callable[[], Any],
    *,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
) -> GraphedLayers:
    """Makes the forward and the backward of each layer a CUDA graph, in place, with the bits of the layers as they are.

        graphs.graph_layers(model.model.layers, lambda: model(**batch, use_cache=False))    # then train as before

    Collective over the layers' tensor-parallel groups; before DistributedDataParallel wraps the model. Later calls need
    the shapes of these. In eval(), and while another graph is captured, a layer runs as it was. What is set after the
    capture does not reach it: a layer's gemm_fn or owner_map, the default gemm_fn, hooks on modules inside a layer.

    Args:
        layers: in the order in which forward calls them, each once; in train(), their parameters on a GPU.
        forward: runs the model once as training does (the same shapes, mode, autocast; with gradients); its results are
            dropped. Arguments of a layer are tensors, numbers, strings and None, and tuples, lists, dicts
            and frozen dataclasses of them.
        num_warmup_iters: passes of each layer before its capture; at least 2.
        allow_unused_input: whether there may be arguments and parameters that want a gradient and get none.

    Memory: the activations of all layers, as in any forward of them, and besides for each layer its arguments and its
    gradients.

    Raises:
        ValueError: layers that cannot be captured, or that forward calls otherwise; says which, and why. On all ranks.
        TypeError: an argument that is none of the above.
        RuntimeError: from the capture, as where a layer waits for the GPU (`.item()`).
    """
    layers = list(layers)
    names = [f"layers[{i}] ({type(layer).__name__})" for i, layer in enumerate(layers)]
    groups = _groups(layers)
    problems = [_problem(layer, name) for layer, name in zip(layers, names, strict=True)]
    if len(set(map(id, layers))) < len(layers):
        problems.append("a layer stands in `layers` twice: each has one graph, and its activations one place")
    if num_warmup_iters < 2:
        problems.append(f"num_warmup_iters={num_warmup_iters}: at least 2, in which the order of weights is learnt")
    _agree("; ".join(filter(None, problems)), groups, "graph_layers cannot capture")
    recorded = _record(layers, forward)
    _agree(_order_problem(recorded, layers, names), groups, "graph_layers: forward must call each layer once, in order")
    calls = [recorded[i][1] for i in range(len(layers))]
    steps = [_Step(layer, call) for layer, call in zip(layers, calls, strict=True)]
    with _ahead_in_graphs(), _stand_ins(layers) as parameters:
        replays = torch.cuda.make_graphed_callables(
            tuple(steps),
            tuple((*call.tensors, *mine) for call, mine in zip(calls, parameters, strict=True)),
            num_warmup_iters=num_warmup_iters,
            allow_unused_input=allow_unused_input,
        )
    turns = Turns(names)
    for index, (layer, step) in enumerate(zip(layers, steps, strict=True)):
        layer.forward = GraphedForward(
            layer, names[index], index, turns, calls[index], replays[index], step.output_tree, step.differentiable
        )
    return GraphedLayers(layers)


class _Step:
    """A layer as a function of tensors alone: its arguments', then its parameters, which are those it has anyway."""

    def __init__(self, layer: nn.Module, call: Call) -> None:
        self._forward, self._call = layer.forward, call
        self.output_tree: Any = None
        self.differentiable: list[bool] = []  # which of the tensors that it returns

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = fill(self._call.tree, tensors[: len(self._call.tensors)])
        weight_cache.enter((id(self), "forward"))
        outputs, self.output_tree = flatten(self._forward(*args, **kwargs), "what a layer returns")
        self.differentiable = [out.requires_grad for out in outputs]
        begun = iter(_Begin.apply(id(self), *(out for out in outputs if out.requires_grad)))
        return tuple(next(begun) if out.requires_grad else out for out in outputs)


class _Begin(torch.autograd.Function):
    """Nothing in forward; in backward the first to run."""

    @staticmethod
    def forward(ctx: Any, step: int, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_cache.enter((ctx.step, "backward"))
        return None, *grads


@contextmanager
def _ahead_in_graphs() -> Iterator[None]:
    """Weights are gathered inside the graphs: a kept one would stay what it was when it was captured."""
    before = weight_cache.keep, weight_cache.ahead_in_graphs
    weight_cache.clear()
    weight_cache.keep, weight_cache.ahead_in_graphs = 0, weight_cache.ahead
    try:
        yield
    finally:
        weight_cache.clear()
        weight_cache.keep, weight_cache.ahead_in_graphs = before


@contextmanager
def _stand_ins(layers: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, ...]]]:
    """For each parameter to train another with the same memory: autograd ties a leaf to the stream of a graph that may
    be alive, a loss of the step before, and that stream is not captured."""
    found: dict[int, nn.Parameter] = {}
    modules = [module for layer in layers for module in layer.modules()]
    places = [(module, key, p) for module in modules for key, p in module._parameters.items()]
    for module, key, p in places:
        if p is not None and p.requires_grad:
            if id(p) not in found:
                found[id(p)] = nn.Parameter(p.detach())
                found[id(p)].__dict__.update(p.__dict__)
            module._parameters[key] = found[id(p)]
    try:
        yield [tuple(p for p in layer.parameters() if p.requires_grad) for layer in layers]
    finally:
        for module, key, p in places:
            module._parameters[key] = p


# --- what is captured -----------------------------------------------------------------------------------------------


def _record(layers: Sequence[nn.Module], forward: Callable[[], Any]) -> list[tuple[nn.Module, Call]]:
    """The calls of layers that forward makes, in order, their arguments as the layers' own hooks leave them."""
    seen: list[tuple[nn.Module, Call]] = []

    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            seen.append((layer, Call(args, kwargs)))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _order_problem(recorded: list[tuple[nn.Module, Call]], layers: Sequence[nn.Module], names: Sequence[str]) -> str:
    if [id(layer) for layer, _ in recorded] == [id(layer) for layer in layers]:
        return ""
    by_id = {id(layer): name for layer, name in zip(layers, names, strict=True)}
    return f"it called {', '.join(by_id[id(layer)] for layer, _ in recorded) or 'none of them'}"


def _problem(layer: nn.Module, name: str) -> str:
    """Why a layer cannot be captured, "" if it can."""
    if not isinstance(layer, nn.Module):
        return f"{name} is no nn.Module"
    if isinstance(layer.__dict__.get("forward"), GraphedForward):
        return f"{name} is captured already: call remove() of what captured it first"
    if not layer.training:
        return f"{name} is in eval(): call train() first"
    for key, parameter in layer.named_parameters():
        if not _on_gpu(parameter):
            return f"{key} of {name} is on {parameter.device}: CUDA graphs need a GPU"
        if parameter.requires_grad and parameter._backward_hooks:
            return f"{key} of {name} has a hook, which the capture would call: register it afterwards"
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return f"{name} has no parameter to train: torch.cuda.graph captures a forward"
    for key, module in layer.named_modules():
        if getattr(module, "fuse_wgrad_accumulation", False):
            return f"{key or name} has fuse_wgrad_accumulation=True: a graph cannot see when main_grad changes"
        hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if module is not layer:  # those of the layer itself stand outside its graph
            hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(f"{__package__}.")]
        if foreign:
            return f"{key or name} in {name} has the hook {foreign[0]}, which a replay would not call: remove it"
    return ""


def _on_gpu(parameter: Tensor) -> bool:
    return parameter.is_cuda


def _groups(layers: Sequence[Any]) -> list[Group]:
    """The tensor-parallel groups of the modules in there, each once."""
    modules = (module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules())
    groups = (getattr(module, "group", None) for module in modules)
    return list(dict.fromkeys(group for group in groups if isinstance(group, Group) and group.size > 1))


def _agree(problem: str, groups: Sequence[Group], what: str) -> None:
    """Raises on every rank of the groups where one has a problem."""
    found = {f"rank {dist.get_rank()}": problem} if groups else {"": problem}
    for group in groups:
        everyone = gather_objects((dist.get_rank(), problem), group)
        found |= {f"rank {rank}": text for rank, text in everyone}
    found = {who: text for who, text in found.items() if text}
    if found:
        raise ValueError(f"{what}: " + "; ".join(f"{who}: {text}" if who else text for who, text in found.items()))
