"""Fused operators in the place of transformers' own code, with its bytes: rotary_embedding and gated_activation.

    rotation        the global `apply_rotary_pos_emb` of a modeling file is rebound to a function that calls
                    rotary_embedding; the former function is behind it
    gated blocks    a module with gate_proj, up_proj (or gate_up_proj), down_proj and an activation gets a class derived
                    from its own, whose forward calls gated_activation; the former forward is behind it

Both are tried once beside the former code: outputs and gradients must have the same bytes for numbers of many
magnitudes. The former code runs with the mode off, and for arguments that the operators do not take. What is patched
into transformers or torch after that is not noticed.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.bits import digest
from ..core.derived_class import derived_class
from ..core.elementwise import inside_a_layer
from ..core.mode import is_tp_invariant_mode_enabled, set_tp_invariant_mode
from ..core.module_hooks import has_known_forward, settings_of
from ..core.torch_private import forward_hooks_of, forward_pre_hooks_of
from ..functional.gated import Activation, gated_activation
from ..functional.rotary_embedding import rotary_embedding
from ..kernels.dtypes import DTYPES
from ..kernels.rowwise.reference_rope import check_rope
from ..layers.parameters import ShardedModule

_ROTATION = "apply_rotary_pos_emb"
_PACKAGES = ("transformers.models.", "transformers_modules.")


def install(model: nn.Module) -> None:
    """Rebinds the rotation of the files that `model` is written in, and gives its gated blocks their class."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for file in sorted({kind.__module__ for kind in kinds if kind.__module__.startswith(_PACKAGES)}):
        names = vars(sys.modules[file])
        former = names.get(_ROTATION)
        if not isinstance(former, FunctionType) or hasattr(former, "former"):  # ours has taken its place
            continue
        if (rotation := rotation_of(former)) is not None:
            names[_ROTATION] = _rotating(former, *rotation)
    for module in model.modules():
        if (block := gated_block_of(module)) is not None:
            module.__dict__["_gated_block"] = block
            module.__class__ = derived_class(type(module), _Gated)


def _same_bytes(
    ours: Callable, theirs: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor], *others: Tensor
) -> bool:
    """Whether two functions of `inputs` and `others` have the same outputs, and gradients of `inputs` for `grads`."""
    digests = []
    try:
        for function in (ours, theirs):
            with torch.enable_grad(), set_tp_invariant_mode(True):
                leaves = [x.clone().requires_grad_() for x in inputs]
                outputs = function(*leaves, *others)
                digests.append(digest([outputs, torch.autograd.grad(outputs, leaves, grads)]))
    except Exception:  # it needs something else: foreign code may raise any exception
        return False
    return digests[0] == digests[1]


def _random(*shape: int, exponents: tuple[int, int] = (0, 1), seed: int = 0) -> Tensor:
    """Normal numbers times powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return x * torch.exp2(torch.randint(*exponents, shape, generator=generator, device="cpu").float())


def _is_plain(x: Any) -> bool:
    return type(x) is Tensor and x.dtype in DTYPES and x.device.type in ("cpu", "cuda") and x.dim() > 0


# --- rotation -------------------------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """interleaved: which features are a pair; partial: whether features beyond those of cos are passed on."""

    interleaved: bool
    partial: bool


def rotation_of(function: Callable[..., Any]) -> Rotation | None:
    """What a function (q, k, cos, sin) of [B, heads, S, D] computes; None if it is not rotary_embedding."""
    for interleaved in (False, True):
        if _rotates(function, interleaved, 8):
            return Rotation(interleaved, _rotates(function, interleaved, 4))
    return None


@torch.inference_mode(False)
def _rotates(function: Callable[..., Any], interleaved: bool, features: int) -> bool:
    """Whether `function` has the bytes of rotary_embedding, with cos and sin of this number of eight features."""
    ours = functools.partial(rotary_embedding, interleaved=interleaved)
    for dtype, batch in itertools.product((torch.float32, torch.bfloat16), (1, 2)):
        q, k = (_random(2, heads, 5, 8, exponents=(-60, 60), seed=heads).to(dtype) for heads in (3, 1))
        grads = [_random(*x.shape, seed=7).to(dtype) for x in (q, k)]
        for x in (q, k, *grads):  # zeros of both signs: autograd adds those of slices, and not others
            x *= _random(*x.shape, seed=9) < 0
        cos, sin = (_random(batch, 5, features, seed=seed).to(dtype) for seed in (3, 4))
        if not _same_bytes(ours, function, (q, k), grads, cos, sin):
            return False
    return True


def _rotating(former: Callable[..., Any], interleaved: bool, partial: bool) -> Callable[..., Any]:
    @functools.wraps(former)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        # a compiler fuses torch's operators by itself
        if torch.compiler.is_compiling() or len(args) != 4 or kwargs or not is_tp_invariant_mode_enabled():
            return former(*args, **kwargs)
        with inside_a_layer():
            if _takes(*args, partial):
                return rotary_embedding(*args, interleaved=interleaved)
        return former(*args)

    rotate.former = former  # type: ignore[attr-defined]
    return rotate


def _takes(q: Any, k: Any, cos: Any, sin: Any, partial: bool) -> bool:
    """Whether rotary_embedding takes these arguments: [B, heads, S, D] twice, and [B or 1, S, R] twice."""
    if not all(map(_is_plain, (q, k, cos, sin))) or cos.requires_grad or sin.requires_grad:
        return False
    try:
        check_rope(_ROTATION, q, k, cos, sin)
    except (TypeError, ValueError):
        return False
    return partial or cos.shape[-1] == q.shape[-1]


# --- gated blocks ---------------------------------------------------------------------------------------------------


class GatedBlock(NamedTuple):
    """The submodules of down(act(gate(x)) * up(x)) by name.

    up: "" where gate(x) holds both, as halves. up_first: whether up is called first, or is the first half.
    computes: the name of the function of `activation`, the module that was tried, in gated_activation.
    """

    gate: str
    up: str
    act: str
    up_first: bool
    computes: Activation
    activation: nn.Module

    def product(self, block: Any, x: Tensor) -> Tensor:
        """act(gate(x)) * up(x)."""
        names = (self.up, self.gate) if self.up_first else (self.gate, self.up)
        outputs = [getattr(block, name)(x) for name in names if name]
        first, second = outputs if self.up else outputs[0].chunk(2, dim=-1)
        gate, up = (second, first) if self.up_first else (first, second)
        alike = (gate.shape, gate.dtype, gate.device) == (up.shape, up.dtype, up.device)
        if not (alike and _is_plain(gate) and _is_plain(up)):
            return self.activation(gate) * up
        with inside_a_layer():
            if self.up:
                return gated_activation(gate, up, self.computes)
            return gated_activation(outputs[0], None, self.computes, up_first=self.up_first)

    def calls_as_tried(self, block: nn.Module) -> bool:
        """Whether the activation is the one that was tried, and has no hook that is to see its call."""
        act = self.activation
        hooks = (*forward_hooks_of(act), *forward_pre_hooks_of(act))
        ours = all(isinstance(key, str) for key in hooks)  # torch's own keys are numbers (core/module_hooks.py)
        return getattr(block, self.act) is act and ours and "forward" not in act.__dict__


class _Gated(nn.Module):
    """What the classes of gated blocks derive from, before the class that the block had."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        block: GatedBlock = self._gated_block
        if len(args) != 1 or kwargs or not is_tp_invariant_mode_enabled() or not block.calls_as_tried(self):
            return super().forward(*args, **kwargs)
        return self.down_proj(block.product(self, args[0]))


def gated_block_of(module: nn.Module) -> GatedBlock | None:
    """How a module computes down(act(gate(x)) * up(x)); None if it does not, or does anything else."""
    children = {name for name, child in module._modules.items() if child is not None}
    act = next(iter(children & {"act_fn", "activation_fn"}), "")
    gate, up = ("gate_up_proj", "") if "gate_up_proj" in children else ("gate_proj", "up_proj")
    activation: Any = getattr(module, act, None)
    if {gate, up or gate, act, "down_proj"} != children or not has_known_forward(activation):
        return None
    if "forward" in module.__dict__ or isinstance(module, (ShardedModule, _Gated)):
        return None
    settings = settings_of(activation, beside_ours=True)
    key = (type(module), type(module).forward, gate, up, act, settings)
    if settings is not None and key in _found:
        found = _found[key]
        return None if found is None else found._replace(activation=activation)
    blocks = (
        GatedBlock(gate, up, act, up_first, computes, activation) for computes in _TRIED for up_first in (False, True)
    )
    training = activation.training
    found = next((block for block in blocks if _computes(type(module), block)), None)
    activation.train(training)  # which the tries have changed
    if settings is not None:
        _found[key] = found
    return found


_found: dict[tuple, GatedBlock | None] = {}  # of each class of blocks and activations; to try one takes the host 50 ms


_TRIED: tuple[Activation, ...] = ("silu", "gelu_tanh", "relu")  # gelu by erf has other last bits on GPUs
_SIZE = 64  # of gate and up


@torch.inference_mode(False)
def _computes(kind: Any, block: GatedBlock) -> bool:
    """Whether a module of this class, which has nothing but these submodules, has the bytes of `block`."""
    calls: Any = []
    twin = object.__new__(kind)
    nn.Module.__init__(twin)

    def put_linear(name: str, first: int | None, end: int | None) -> None:
        """A stand-in for a linear layer: some features of its input."""
        setattr(twin, name, lambda x: calls.append(name) or x[..., first:end].clone())

    put_linear("down_proj", None, None)
    put_linear(block.gate, 0, _SIZE if block.up else None)
    if block.up:
        put_linear(block.up, _SIZE, None)
    setattr(twin, block.act, block.activation)
    for dtype, exponents, training in itertools.product(
        (torch.float32, torch.bfloat16), ((-12, 6), (-60, 60)), (True, False)
    ):
        x = _random(32, 2 * _SIZE, exponents=exponents).to(dtype)
        dy = _random(32, _SIZE, seed=1).to(dtype)
        calls.clear()
        same = _same_bytes(lambda x: twin.down_proj(block.product(twin, x)), twin.train(training), (x,), (dy,))
        if not same or calls[: len(calls) // 2] != calls[len(calls) // 2 :]:
            return False
    return True
