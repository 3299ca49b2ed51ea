"""A layer whose forward and backward are CUDA graphs: the replacement of its forward, and the checks that a call equals
the captured one."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..batch_invariant.dispatch import is_on as is_batch_invariant
from ..comm.collectives import is_capturing
from ..core.dtensors import grad_like, is_dtensor, local_of
from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled
from ..core.torch_private import version_of
from .arguments import Call, Node, fill, flatten_call

logger = logging.getLogger(__name__)


def on_rank() -> str:
    return f" on rank {dist.get_rank()}" if dist.is_initialized() else ""


def conditions() -> dict[str, Any]:
    """The state, besides the arguments and the layer, that a capture depends on."""
    return {
        "TP-invariant mode": is_tp_invariant_mode_enabled(),
        "TP_INVARIANT_CHECK": is_call_check_enabled(),
        "batch_invariant()": is_batch_invariant(),
        "autocast": torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.cuda.current_device()": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
    }


def changed_condition(current: dict[str, Any], captured: dict[str, Any]) -> str:
    for name, value in captured.items():
        if current[name] != value:
            return f"{name} is {current[name]}, and was {value}"
    return ""


class ActivationOwnership:
    """Which forward's activations each layer's graph memory holds.

    Graphs that are captured in sequence share memory, in the order of the capture: the forward or backward of a layer
    may overwrite the activations of this layer and of the layers after it, and those of all layers for other shapes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._shape: int | None = None  # which of the captured calls the owners belong to
        self._owners: dict[int, int] = {}  # of a layer, the forward whose activations it holds
        self._forwards = 0
        self._logged = False

    def log_once(self, name: str, problem: str) -> None:
        if not self._logged:
            self._logged = True
            logger.warning("%s%s runs without CUDA graphs, as more calls may: %s", name, on_rank(), problem)

    def forward(self, index: int, shape: int, grad: bool) -> int:
        if shape != self._shape:
            self._owners.clear()
            self._shape = shape
        self._invalidate_from(index)
        self._forwards += 1
        if grad:
            self._owners[index] = self._forwards
        return self._forwards

    def backward(self, index: int, number: int) -> None:
        if self._owners.get(index) != number:
            raise RuntimeError(
                f"{self._names[index]}{on_rank()}: the activations of this backward are gone. It has run before, or "
                "since its forward a graphed layer at or before it has run forward (checkpointing does that), or any "
                "for other shapes, or one before it backward, and their CUDA graphs have place for one pass. Run "
                "backward after each forward, "
                "layers in order, or call remove() of what graph_layers returned"
            )
        self._invalidate_from(index)

    def _invalidate_from(self, index: int) -> None:
        for other in [i for i in self._owners if i >= index]:
            del self._owners[other]


class _Enter(torch.autograd.Function):
    """Returns its inputs, of DTensors what is local; copies their gradients, which the next replay overwrites."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtensors = [x if is_dtensor(x) else None for x in tensors]
        # a view, because autograd writes into what is returned
        return tuple(local_of(x).view_as(local_of(x)) if is_dtensor(x) else x for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        likes = zip(grads, ctx.dtensors, strict=True)
        return tuple(None if grad is None else grad_like(grad.clone(), like) for grad, like in likes)


class _Leave(torch.autograd.Function):
    """Copies the graph's results; in backward it checks that the graph may be replayed."""

    @staticmethod
    def forward(
        ctx: Any, layer: GraphedForward, differentiable: Sequence[bool], number: int, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.number, ctx.versions, ctx.differentiable = layer, number, layer.versions(), differentiable
        copies = tuple(out.clone() for out in outputs)
        ctx.mark_non_differentiable(*(c for c, is_one in zip(copies, differentiable, strict=True) if not is_one))
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.layer.check_backward(ctx.number, ctx.versions, ctx.differentiable, grads)
        return None, None, None, *grads


class Captured(NamedTuple):
    """A layer's graphs: `replay` of all tensors that its function takes, and how its arguments and results lie."""

    call: Call
    replay: Callable[..., Any]
    output_tree: Node
    differentiable: Sequence[bool]  # which of the tensors that it returns


class GraphedForward:
    """Replaces a layer's forward by its CUDA graphs, those of each captured call; with eager_else others run as before.

    Raises:
        ValueError: other arguments, conditions, modules or parameters than at the capture; says which.
        TypeError: an argument that cannot be part of a graph.
        RuntimeError: in backward, where activations or parameters are no more those of its forward, or where a result
            got no gradient that got one in the capture.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        index: int,
        ownership: ActivationOwnership,
        captured: Sequence[Captured],
        eager_else: bool,
    ) -> None:
        self._layer, self._forward, self._patched = layer, layer.forward, layer.__dict__.get("forward")
        self._name, self._index, self._ownership = name, index, ownership
        self._captured, self._eager_else = captured, eager_else
        self._conditions = conditions()
        self._modules = [(key or name, module) for key, module in layer.named_modules()]
        # tensors that are plain attributes: cosines and sines, masks
        self._attributes = [
            [key for key, x in vars(module).items() if isinstance(x, Tensor)] for _, module in self._modules
        ]
        self._all_parameters = list(layer.parameters())
        self._state = self._state_now()
        # references to what the graph reads, so that it stays in memory even if the layer drops it
        self._held = [
            x for _, m in self._modules for x in (*m._buffers.values(), *vars(m).values()) if isinstance(x, Tensor)
        ]
        self._trained = [p for p in layer.parameters() if p.requires_grad]

    def remove(self) -> None:
        """Frees the graphs and restores the layer, even if its forward has been wrapped since the capture."""
        self._captured = ()
        if self._layer.__dict__.get("forward") is self:
            if self._patched is None:
                del self._layer.forward
            else:
                self._layer.forward = self._patched

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer runs as the layer did before: its parameters are others."""
        if self._patched is not None:
            return copy.deepcopy(self._patched, memo)
        copied = memo.get(id(self._layer))
        return self._forward if copied is None else types.MethodType(type(copied).forward, copied)

    # --- what it was captured with

    def _state_now(self) -> list[tuple]:
        """For each module, the state whose change a graph would not notice."""
        state = []
        for (_, module), attributes in zip(self._modules, self._attributes, strict=True):
            own = vars(module)
            tensors = (*module._parameters.values(), *module._buffers.values(), *(own.get(key) for key in attributes))
            held = [
                (id(t), local_of(t).data_ptr(), t.stride(), t.requires_grad) if isinstance(t, Tensor) else None
                for t in tensors
            ]
            state.append((module.training, list(map(id, module._modules.values())), held))
        return state

    def versions(self) -> list[int]:
        return [version_of(local_of(p)) for p in self._all_parameters]

    def _changed_since_capture(self) -> str:
        if problem := changed_condition(conditions(), self._conditions):
            return problem
        if (state := self._state_now()) != self._state:
            changed = [mine != current for mine, current in zip(self._state, state, strict=True)].index(True)
            return (
                f"in {self._modules[changed][0]} a module, parameter, buffer or other tensor is another, lies "
                "elsewhere, or has another requires_grad or training"
            )
        return ""

    def _find(self, tensors: Sequence[Tensor], tree: Node, grad: bool) -> tuple[int | None, str]:
        """Which captured call has such arguments; None if none has, and how they differ."""
        problems: dict[str, None] = {}
        for shape, captured in enumerate(self._captured):
            problem = captured.call.difference(tensors, tree, grad)
            if not problem:
                return shape, ""
            problems[problem] = None
        return None, "; ".join(problems)

    def check_backward(
        self, number: int, versions: list[int], differentiable: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> None:
        self._ownership.backward(self._index, number)
        if versions != self.versions():
            raise RuntimeError(
                f"{self._name}{on_rank()}: a parameter was modified by an inplace operation between forward and "
                "backward, which needs it as it was"
            )
        for i, (grad, is_one) in enumerate(zip(grads, differentiable, strict=True)):
            if is_one and grad is None:
                raise RuntimeError(
                    f"{self._name}{on_rank()}: tensor {i} of what it returns takes no part in this backward, and the "
                    "captured one goes through it: detach it in the layer, or have it take part"
                )

    # --- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._captured or not self._layer.training or torch.compiler.is_compiling() or is_capturing():
            return self._forward(*args, **kwargs)
        tensors, tree = flatten_call(args, kwargs, f"an argument of {self._name}")
        grad, shape = torch.is_grad_enabled(), None
        if not (problem := self._changed_since_capture()):
            shape, problem = self._find(tensors, tree, grad)
            if shape is None and self._eager_else:
                self._ownership.log_once(self._name, problem)
                return self._forward(*args, **kwargs)
        if shape is None:
            raise ValueError(
                f"{self._name}{on_rank()} is a CUDA graph of another call: {problem}. Call it as it was captured, or "
                "remove() what graph_layers returned and capture anew"
            )
        captured, number = self._captured[shape], self._ownership.forward(self._index, shape, grad)
        if not grad:
            return fill(
                captured.output_tree, [out.clone() for out in captured.replay(*tensors, *map(local_of, self._trained))]
            )
        wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
        entered = _Enter.apply(*(tensors[i] for i in wanted), *self._trained)
        for i, x in zip(wanted, entered, strict=False):
            tensors[i] = x
        outputs = captured.replay(*tensors, *entered[len(wanted) :])
        return fill(captured.output_tree, _Leave.apply(self, captured.differentiable, number, *outputs))
