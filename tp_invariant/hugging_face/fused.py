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
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.bits import raw_bytes
from ..core.derived_class import derived_class
from ..core.elementwise import inside_a_layer
from ..core.mode import is_tp_invariant_mode_enabled, set_tp_invariant_mode
from ..core.module_hooks import has_known_forward
from ..core.torch_private import forward_hooks_of, forward_pre_hooks_of
from ..functional.gated import ACTIVATIONS, Activation, gated_activation
from ..functional.rotary_embedding import rotary_embedding
from ..kernels.dtypes import DTYPES
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


def _same_bytes(ours: Callable, theirs: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether two functions of `inputs` have the same outputs, and gradients of the inputs for `grads` of outputs."""
    results = []
    for function in (ours, theirs):
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in inputs]
            outputs = function(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            results.append([*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)])
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))
        for a, b in zip(*results, strict=True)
    )


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

    def called(rotate: Callable[..., Any], cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, **options: Any) -> Any:
        return rotate(q, k, cos, sin, **options)

    for dtype in (torch.float32, torch.bfloat16):
        q, k = (_random(2, heads, 5, 8, exponents=(-60, 60), seed=heads).to(dtype) for heads in (3, 1))
        grads = [_random(*x.shape, seed=7).to(dtype) for x in (q, k)]
        for x in (q, k, *grads):  # zeros of both signs: autograd adds those of slices, and not others
            x *= _random(*x.shape, seed=9) < 0
        for batch in (1, 2):
            cos, sin = (_random(batch, 5, features, seed=seed).to(dtype) for seed in (3, 4))
            ours = functools.partial(called, rotary_embedding, cos, sin, interleaved=interleaved)
            try:
                if not _same_bytes(ours, functools.partial(called, function, cos, sin), (q, k), grads):
                    return False
            except Exception:  # it takes other arguments: foreign code may raise any exception
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
    tensors = (q, k, cos, sin)
    if not all(map(_is_plain, tensors)) or len({(x.dtype, x.device) for x in tensors}) > 1:
        return False
    if cos.requires_grad or sin.requires_grad or (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or cos.shape != sin.shape:
        return False
    batch, _, tokens, size = q.shape
    features = cos.shape[2]
    return (
        (k.shape[0], *k.shape[2:]) == (batch, tokens, size)
        and cos.shape[:2] in ((batch, tokens), (1, tokens))
        and (features == size or (partial and 0 < features < size))
        and features % 2 == 0
    )


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
        a, b = outputs[0], outputs[-1]
        if _is_plain(a) and _is_plain(b) and a.shape == b.shape and (a.dtype, a.device) == (b.dtype, b.device):
            if not self.up:
                with inside_a_layer():
                    return gated_activation(a, None, self.computes, up_first=self.up_first)
            with inside_a_layer():
                return gated_activation(*((b, a) if self.up_first else (a, b)), self.computes)
        first, second = outputs if self.up else outputs[0].chunk(2, dim=-1)
        return first * self.activation(second) if self.up_first else self.activation(first) * second

    def calls_as_tried(self, block: nn.Module) -> bool:
        """Whether the activation is the one that was tried, and has no hook that is to see its call."""
        act = self.activation
        hooks = (*forward_hooks_of(act), *forward_pre_hooks_of(act))
        ours = all(isinstance(key, str) for key in hooks)  # torch's own keys are numbers (core/module_hooks.py)
        return getattr(block, self.act) is act and ours and "forward" not in act.__dict__


class _Gated(nn.Module):
    """What the classes of gated blocks derive from, before the class that the block had."""

    _gated_block: Any
    down_proj: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block: GatedBlock = self._gated_block
        if len(args) != 1 or kwargs or not is_tp_invariant_mode_enabled() or not block.calls_as_tried(self):
            return super().forward(*args, **kwargs)
        return self.down_proj(block.product(self, args[0]))


def gated_block_of(module: nn.Module) -> GatedBlock | None:
    """How a module computes down(act(gate(x)) * up(x)); None if it does not, or does anything else."""
    children = {name for name, child in module._modules.items() if child is not None}
    act = next((name for name in ("act_fn", "activation_fn") if name in children), "")
    halves = "gate_up_proj" in children
    gate, up = ("gate_up_proj", "") if halves else ("gate_proj", "up_proj")
    fits = {gate, up or gate, act, "down_proj"} == children and "forward" not in module.__dict__
    if not fits or isinstance(module, (ShardedModule, _Gated)):
        return None
    activation: Any = getattr(module, act)
    if not has_known_forward(activation):
        return None
    for computes in ACTIVATIONS:
        if computes == "gelu":  # by erf, which has other last bits on GPUs (kernels/rowwise/torch_gated.py)
            continue
        for up_first in (False, True):
            block = GatedBlock(gate, up, act, up_first, computes, activation)
            if _computes(type(module), block):
                return block
    return None


class _Part(nn.Module):
    """A stand-in for a linear layer: some features of its input. It notes its name when it is called."""

    def __init__(self, name: str, features: slice, calls: list[str]) -> None:
        super().__init__()
        self.name, self.features, self.calls = name, features, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.name)
        return x[..., self.features].clone()


_SIZE = 64  # of gate and up


@torch.inference_mode(False)
def _computes(kind: Any, block: GatedBlock) -> bool:
    """Whether a module of this class, which has nothing but these submodules, has the bytes of `block`."""
    calls: list[str] = []
    twin = object.__new__(kind)
    nn.Module.__init__(twin)
    parts = [(block.gate, slice(0, _SIZE)), (block.up, slice(_SIZE, None))] if block.up else [(block.gate, slice(None))]
    for name, features in (*parts, ("down_proj", slice(None))):
        setattr(twin, name, _Part(name, features, calls))
    setattr(twin, block.act, block.activation)

    def ours(x: Tensor) -> Tensor:
        return twin.down_proj(block.product(twin, x))

    for dtype in (torch.float32, torch.bfloat16):
        for exponents in ((-12, 6), (-60, 60)):
            x = _random(32, 2 * _SIZE, exponents=exponents).to(dtype)
            dy = _random(32, _SIZE, seed=1).to(dtype)
            for training in (True, False):
                calls.clear()
                try:
                    with set_tp_invariant_mode(True):
                        same = _same_bytes(ours, twin.train(training), (x,), (dy,))
                except Exception:  # it needs something else: foreign code may raise any exception
                    return False
                if not same or calls[: len(calls) // 2] != calls[len(calls) // 2 :]:
                    return False
    return True
