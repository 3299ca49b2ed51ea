"""Whether what lies between the blocks treats each token by itself, found by running it, not by names.

Under sequence parallelism the code of a decoder layer outside of its blocks, and between decoder layers, sees this
rank's tokens alone. Modules with parameters are refused there by the survey; but a shift by one token, an FFT or a mean
over the sequence has none, and no shape shows it. So a copy of the model runs twice. In place of what the blocks put
out (and of what enters the first layer), random hidden states go on, so that a block, which gets all tokens, mixes
nothing here. One token's hidden states are the same in both runs; the other tokens, their number, and its place among
them are not. Wherever a block or the final norm gets hidden states, those of this token must be the same again.

The copy needs no memory: each of its parameters is one number, expanded, also where the model's are on the meta device.
It runs on the CPU; linear layers return copies of one feature, so that it multiplies nothing large.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .feature_blocks import is_norm
from .shape_probe import use_stock_attention

_BATCH = 3
_RUNS = ((5, 1), (7, 4))  # how many tokens, and the place of the one that is the same in both
_CLOSE = 1e-3  # what rounding may change; other tokens change all of it


class _End(Exception):
    """The final norm is reached."""


class _Unknown(Exception):
    """The model does not run on made-up arguments, or not as sequence parallelism needs it, which other checks say."""


class _Run:
    """One run of the copy: hooks and forwards of its modules, and what they have seen of the one token."""

    def __init__(self, tokens: int, place: int) -> None:
        self.tokens, self.place = tokens, place
        self.seen: list[tuple[bool, str, Tensor]] = []  # (whether it is gathered there, the module, its hidden states)
        self.inside, self.cuts = False, 0

    def fits(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() >= 3 and x.is_floating_point() and x.shape[:2] == (_BATCH, self.tokens)

    def random_like(self, x: Tensor) -> Tensor:
        self.cuts += 1
        generator = torch.Generator().manual_seed(self.cuts)
        same = torch.randn((_BATCH, *x.shape[2:]), generator=generator, dtype=torch.float32, device="cpu")
        generator.manual_seed(1000 * self.tokens + self.cuts)
        states = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
        states[:, self.place] = same
        return states.to(x.dtype)

    def note(self, gathered: bool, name: str, x: Any) -> None:
        if gathered and not self.fits(x):
            raise _Unknown
        for leaf in x if isinstance(x, (tuple, list)) else (x,):
            if self.inside and self.fits(leaf):
                self.seen.append((gathered, name, leaf[:, self.place].clone()))

    def enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before the first layer."""
        first = _first(args, kwargs)
        if not self.fits(first):
            raise _Unknown
        self.inside, states = True, self.random_like(first)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def end(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.inside:
            self.note(True, self.norm_name, _first(args, kwargs))
            raise _End

    def block(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a block's forward, which says in what its output comes."""
        first = _first(args, kwargs)
        if not self.inside:
            return own(*args, **kwargs)
        self.note(True, name, first)
        try:
            output = own(*args, **kwargs)
        except Exception:  # it needs values, or a GPU, and what it puts out is guessed: foreign code may raise anything
            output = (first, None) if self.pairs else first
        before = self.cuts
        output = tree_map_only(Tensor, lambda x: self.random_like(x) if self.fits(x) else x, output)
        if self.cuts == before:
            raise _Unknown
        return output

    def run(self, model: nn.Module, stack: Any, blocks: Collection[str], experts: Collection[str]) -> None:
        """Raises: _Unknown: the final norm was not reached."""
        twin, self.norm_name = _light_copy(model), stack.norm_name
        for name in experts:
            _module_at(twin, name).forward = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
        for name in blocks:
            module = _module_at(twin, name)
            module.forward = functools.partial(self.block, name, module.forward)
        layers: Any = _module_at(twin, stack.prefix.removesuffix("."))
        for name, module in layers.named_modules(prefix=stack.prefix.removesuffix(".")):
            if not any(name == block or name.startswith(f"{block}.") for block in blocks):
                module.register_forward_hook(functools.partial(self._leave, name))
        layers[0].register_forward_pre_hook(self.enter, with_kwargs=True)
        _module_at(twin, stack.norm_name).register_forward_pre_hook(self.end, with_kwargs=True)
        ids = torch.zeros(_BATCH, self.tokens, dtype=torch.long, device="cpu")
        calls: list[Callable[[], Any]] = [functools.partial(twin, ids)]
        if hasattr(getattr(model, "config", None), "_attn_implementation"):
            calls = [functools.partial(twin, input_ids=ids, use_cache=False)]
        else:
            x = self._hidden_states(_module_at(twin, stack.norm_name))
            calls += [functools.partial(twin, x), functools.partial(self._call_layers, layers, x)]
        for call, self.pairs in itertools.product(calls, (False, True)):
            self.inside, self.cuts, self.seen = False, 0, []
            try:
                call()
            except _End:
                return
            except Exception:  # foreign code may raise any exception
                continue
        raise _Unknown

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.note(False, name, output)

    def _hidden_states(self, norm: nn.Module) -> Tensor:
        size = next((m.get_parameter("weight").numel() for m in norm.modules() if is_norm(m)), None)
        if size is None:
            raise _Unknown
        return torch.zeros(_BATCH, self.tokens, size, dtype=torch.float32, device="cpu")

    def _call_layers(self, layers: Any, x: Any) -> None:
        """One after another, for a model of which nothing says how it is called; arguments without a default: None."""
        for layer in layers:
            others = list(inspect.signature(layer.forward).parameters.values())[1:]
            needed = [
                p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]
            x = layer(x, **dict.fromkeys(needed))
            x = x[0] if isinstance(x, tuple) else x
        self.note(True, self.norm_name, x)
        raise _End


def _module_at(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


def _first_feature(size: int, x: Tensor) -> Tensor:
    return x[..., :1].expand(*x.shape[:-1], size).contiguous()


def _light_copy(model: nn.Module) -> nn.Module:
    def light(p: Tensor) -> nn.Parameter:
        dtype = torch.float32 if p.is_floating_point() else p.dtype
        return nn.Parameter(torch.full((), 0.5, dtype=torch.float32, device="cpu").to(dtype).expand(p.shape), False)

    def on_cpu(b: Tensor) -> Tensor:
        dtype = torch.float32 if b.is_floating_point() else b.dtype
        return torch.zeros(b.shape, dtype=dtype, device="cpu") if b.is_meta else b.detach().to("cpu", dtype, copy=True)

    memo: dict[int, Any] = {id(p): light(p) for p in model.parameters()}
    twin = copy.deepcopy(model, memo | {id(b): on_cpu(b) for b in model.buffers()}).eval()
    use_stock_attention(twin)
    for module in twin.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # a user's, who did not call this copy
            hooks.clear()
        module.__dict__.pop("forward", None)
        if isinstance(module, nn.Linear):
            module.__dict__["forward"] = functools.partial(_first_feature, module.out_features)
    return twin


def mixed_tokens(model: nn.Module, stack: Any, blocks: Collection[str], experts: Collection[str]) -> tuple[str, str]:
    """(the first module that gets hidden states of a token that depend on other tokens or on its place, how).

    ("", "") where there is none, or where the model could not be run.

    Args:
        model: not yet converted; it is not changed.
        stack: where its decoder layers are (survey.py).
        blocks: the names of the modules that get all tokens.
        experts: the names of experts modules, whose output has their input's shape; their code may need values.
    """
    seen = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        for tokens, place in _RUNS:
            run = _Run(tokens, place)
            try:
                run.run(model, stack, blocks, experts)
            except Exception:  # _Unknown, and whatever copying a foreign module raises
                return "", ""
            seen.append(run.seen)
    if [entry[:2] for entry in seen[0]] != [entry[:2] for entry in seen[1]]:
        return "", ""
    suspect = ""
    for (gathered, name, a), (_, _, b) in zip(*seen, strict=True):
        apart = a.shape == b.shape and float((a - b).norm()) > _CLOSE * float(a.norm() + b.norm())
        if gathered and apart:
            return name, f" (first in the output of {suspect})" if suspect else ""
        suspect = "" if gathered else suspect or (name if apart else "")
    return "", ""
