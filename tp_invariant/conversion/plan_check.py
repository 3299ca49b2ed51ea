"""parallelize(.., verify=True): a model by its plan against the unsharded one, before the model itself is touched.

Names and shapes do not show what the code between the layers does with a part of the features: it may split q, k and v
out of one projection, or compute a mean over sharded features. So copies of the model run forward and backward:

    exact    in float64, unsharded
    plain    in float32, unsharded
    ours     in float32, by the plan, over the ranks, in the mode as it is
    one      in float32, by the plan, on one rank; with the mode on

The output of each module and the gradient of each parameter and input are compared with those of `exact`. An error
counts as rounding if it is at most MAX_ERROR_RATIO times that of `plain`, or at most the square root of float32's
epsilon; with a wrong plan about one digit is right, or none. Backward starts from random gradients of the outputs, so
that no gradient is zero by symmetry. `ours` must also have the bytes of `one`: code between the layers may be right,
and add in an order that follows from how many features a rank has.

The model does not change: no gradient, buffer, hook or flag, and no state of a generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.full_state import run_on_all_ranks
from ..comm.collectives import Group
from ..comm.wire import gather_objects
from ..core.bits import digest, leaves
from ..core.copies import copy_of_module
from ..core.layout import shard
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.torch_private import tree
from ..gemm.weights import weight_cache
from ..hugging_face.experts import use_own_code
from ..layers.linear import Linear
from ..layers.parameters import ShardedModule, named_shard_specs
from .gradient_flow import IncompleteGradient, check_gradient_flow

_EPS, _LARGEST = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).max
MAX_ERROR_RATIO = 10.0  # what rounding in another order may cost
FLOOR = _EPS**0.5
SMALL = _EPS**0.25  # times the root mean square of all gradients: errors are relative to no less than this
TOKENS = 8  # at least, in the random sequence for a Hugging Face model


Example = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position, and by name


def example_of(model: nn.Module, given: Any, group: Group) -> Example:
    """What the model is called with: `example_inputs` as parallelize takes them, or token ids for a Hugging Face model.

    Raises:
        ValueError: none given, and the model is none of Hugging Face's with a vocabulary.
        TypeError: neither a tensor nor a tuple, list or dict.
    """
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    if given is not None:
        raise TypeError(f"example_inputs is a {type(given).__name__}: give a tensor, a tuple, or a dict of arguments")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or not hasattr(text, "_attn_implementation"):
        raise ValueError(
            f"verify=True needs something to call {type(model).__name__} with: give example_inputs=x, a tuple of "
            "arguments or a dict of them, the same on every rank (a few tokens of random values do)"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    length = -(-TOKENS // group.size) * group.size  # sequence parallelism divides it
    ids = torch.randint(size, (2, length), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    return (), dict(input_ids=ids, use_cache=False)


# --- one forward and backward ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one forward and backward of a copy gave, in float64. outputs and seen: lists of tensors, in order."""

    seen: dict[str, list[Tensor]] = field(default_factory=dict)  # by the names of modules, in the order of their ends
    outputs: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)  # of parameters and inputs, whole
    incomplete: str = ""  # what gradient_flow.py has to say


def _floats(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _copied_in_float64(x: Tensor) -> Tensor:
    """A copy, because x may be changed in place later."""
    return x.detach().to(torch.float64, copy=True)


def _forward(model: nn.Module, example: Example, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(floating-point outputs, the floating-point tensors among the inputs)."""
    inputs: list[Tensor] = []

    def own(x: Tensor) -> Tensor:
        x = x.detach().clone()
        if x.is_floating_point():
            x = x.to(dtype).requires_grad_()
            inputs.append(x)
        return x

    args, kwargs = tree.tree_map_only(Tensor, own, example)
    return _floats(model(*args, **kwargs)), inputs


def _part_of(full: Tensor, shape: torch.Size, group: Group) -> Tensor | None:
    """This rank's consecutive part of `full`, along the one dim in which it is larger than `shape`; else None."""
    if full.dim() != len(shape):
        return None
    dims = [dim for dim, (n, mine) in enumerate(zip(full.shape, shape, strict=True)) if n != mine]
    if not dims:
        return full
    if len(dims) > 1 or full.shape[dims[0]] != shape[dims[0]] * group.size:
        return None
    return shard(full, dim=dims[0], rank=group.rank, world=group.size)


def _run(model: nn.Module, example: Example, dtype: torch.dtype, like: Run | None, group: Group) -> Run:
    """`like`: exact's, whose outputs tell the full shapes."""
    run = Run()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        run.seen.setdefault(name, []).extend(map(_copied_in_float64, _floats(output)))

    model.zero_grad(set_to_none=True)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(functools.partial(note, name)))
        outputs, inputs = _forward(model, example, dtype)
    run.outputs = [_copied_in_float64(y) for y in outputs]
    shapes = [y.shape for y in (run if like is None else like).outputs]
    differentiable: tuple[list[Tensor], list[Tensor]] = ([], [])
    if len(shapes) != len(outputs):
        raise ValueError(f"the model gives {len(outputs)} tensors by the plan, {len(shapes)} without")
    try:
        check_gradient_flow(model, outputs, inputs)
    except IncompleteGradient as error:
        run.incomplete = str(error)
    for index, (y, shape) in enumerate(zip(outputs, shapes, strict=True)):
        if y.requires_grad:  # the same random gradient for every copy; this rank's part where the output is one
            generator = torch.Generator().manual_seed(index + 1)
            full = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(y)
            part = _part_of(full, y.shape, group)
            differentiable[0].append(y)
            differentiable[1].append(full if part is None else part)
    if differentiable[0]:
        torch.autograd.backward(*differentiable)
    for name, parameter, spec in named_shard_specs(model):
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            run.grads[name] = spec.full(grad).double()
    for index, x in enumerate(inputs):
        run.grads[f"input {index}"] = (torch.zeros_like(x) if x.grad is None else x.grad).double()
    return run


# --- comparing ------------------------------------------------------------------------------------------------------


def _expected(module: nn.Module, full: Tensor, shape: torch.Size, group: Group) -> Tensor | None:
    """The part of the unsharded module's output that `module` should return on this rank; None if that is not known.

    It is known for this library's layers. Other modules are compared if their output is whole: elsewhere the model's
    code may have the features in any order.
    """
    if isinstance(module, Linear) and module.parallel_mode == "column" and not module.gather_output:
        return shard(full, dim=-1, rank=group.rank, world=group.size, stride=module.shard_spec("weight").stride)
    if isinstance(module, ShardedModule):
        return _part_of(full, shape, group)
    return full if full.shape == shape else None


def _difference(value: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """The error by its norm, over that of `exact`, or of elements of the size `least` where these are smaller.

    What is NaN, infinite or beyond float32 in `exact` (a mask) is no part of a norm; `value` must have the same there.
    """
    if (beyond := ~(exact.abs() <= _LARGEST)).any():
        mine, theirs = (x[beyond].clamp(-_LARGEST, _LARGEST) for x in (value, exact))
        if not torch.allclose(mine, theirs, 0, 0, equal_nan=True):
            return float("inf")
        value, exact = value[~beyond], exact[~beyond]
    size = max(float(exact.norm()), least * exact.numel() ** 0.5)
    error = float((value - exact).norm())
    return error / size if size else float(error > 0)


def _judge(name: str, error: float, plain_error: float) -> dict[str, str]:
    """{name: by how much it is off}, {} if that may be rounding."""
    limit = max(MAX_ERROR_RATIO * plain_error, FLOOR)
    return {} if error <= limit else {name: f"{name} is off by {error:.2%} (rounding would be at most {limit:.2%})"}


def _expected_outputs(
    model: nn.Module, ours: Run, reference: Run, group: Group
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """(module, which of its tensors, ours, what it should be) of the modules of which that is known."""
    modules = dict(model.named_modules())
    for name, theirs in reference.seen.items():
        mine = ours.seen.get(name, [])
        for index, (x, full) in enumerate(zip(mine, theirs, strict=True) if len(mine) == len(theirs) else ()):
            want = _expected(modules[name], full, x.shape, group)
            if want is not None and want.shape == x.shape:
                yield name, index, x, want


def _wrong_outputs(model: nn.Module, ours: Run, plain: Run, exact: Run, group: Group) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, index, mine, want in _expected_outputs(model, ours, exact, group):
        rounding = _difference(plain.seen[name][index], exact.seen[name][index])
        wrong |= _judge(f"the output of {name}", _difference(mine, want), rounding)
    for index, (mine, near, full) in enumerate(zip(ours.outputs, plain.outputs, exact.outputs, strict=True)):
        part = _part_of(full, mine.shape, group)
        which = f"output {index} of the model" if len(exact.outputs) > 1 else "the model's output"
        if part is None:
            raise ValueError(
                f"{which} has shape {tuple(mine.shape)} by the plan over {group.size} ranks, and without it "
                f"{tuple(full.shape)}"
            )
        wrong |= _judge(which, _difference(mine, part), _difference(near, full))
    return wrong


def _wrong_grads(ours: Run, plain: Run, exact: Run) -> dict[str, str]:
    """In the order of backward: a wrong gradient first appears nearest to the model's output."""
    everything = torch.cat([grad.flatten() for grad in exact.grads.values()]) if exact.grads else torch.zeros(1)
    least = SMALL * float(everything.square().mean().sqrt())
    position = {name: place for place, name in enumerate(exact.seen)}
    wrong: dict[str, str] = {}
    for name in sorted(exact.grads, key=lambda name: -position.get(name.rpartition(".")[0], -1)):
        full = exact.grads[name]
        wrong |= _judge(name, _difference(ours.grads[name], full, least), _difference(plain.grads[name], full, least))
    return wrong


def _other_bytes(model: nn.Module, ours: Run, one: Run, group: Group) -> str:
    """The first of what `ours` has with other bytes than `one`, "" for nothing."""
    for name, _, mine, want in _expected_outputs(model, ours, one, group):
        if digest(mine) != digest(want):
            return f"the output of {name}"
    for mine, full in zip(ours.outputs, one.outputs, strict=True):
        if digest(mine) != digest(_part_of(full, mine.shape, group)):
            return "the model's output"
    return next((f"the gradient of {n}" for n in one.grads if digest(ours.grads[n]) != digest(one.grads[n])), "")


_OUTPUT_HINT = (
    "What lies between it and the layers before takes a part of the features for all of them, or in another order. "
    "Where one linear layer's output is split into pieces (q, k and v, or gate and up), each rank needs its part of "
    'each piece: tpi.Part("colwise", sizes=(..)), or partition_stride=3 for three equal ones. A sum, mean or norm over '
    "features that are sharded, or attention over heads that the model counts itself, is wrong too."
)
_BYTES = "values are right, but"
_BYTES_HINT = (
    "Operators of torch in the sharded region may add in an order that follows from how many features a rank has: a "
    "sum, mean, norm, cumulative sum or softmax over tokens, or what multiplies several features of a rank by one "
    "value; and on a CPU an elementwise function may compute an element by where it lies. Give the layer before it the "
    "style 'colwise_gather_output' and the one after it 'rowwise_split_input', so that every rank has all features."
)
_GRAD_HINT = (
    " Its gradient is a sum, of which each rank has a part, say because it is the same on every rank and is used with "
    "features of which each rank has a part."
)


def _verdict(model: nn.Module, ours: Run, plain: Run, exact: Run, group: Group) -> str:
    """What is wrong, "" for nothing."""
    for value in (*exact.outputs, *exact.grads.values()):
        if not value.isfinite().all():
            return "the unsharded model itself gives infinite values or NaN for this input: give other example_inputs"
    outputs, grads = _wrong_outputs(model, ours, plain, exact, group), _wrong_grads(ours, plain, exact)
    if not outputs and not grads:
        return ""
    first = next(iter((outputs or grads).values()))
    if outputs:
        lines = [f"{first}. {_OUTPUT_HINT}"]
    else:
        lines = [f"outputs are right; the gradient of {first}.{'' if ours.incomplete else _GRAD_HINT}"]
    rest = list(grads)[0 if outputs else 1 :]
    if rest:
        shown = ", ".join(rest[:5]) + (f" and {len(rest) - 5} more" if len(rest) > 5 else "")
        lines.append(f"also wrong: the gradients of {shown}")
    lines += [ours.incomplete] if ours.incomplete else []
    return "\n".join(lines)


@contextmanager
def _preserved_state(model: nn.Module) -> Iterator[None]:
    """Inside, gradients are on and autocast is off; at the end the random generators are restored."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        for kind in {p.device.type for p in model.parameters()} | {"cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(weight_cache.clear)  # of what it learnt of the copies
        yield


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = copy_of_module(model)
    use_own_code(twin)
    for module in twin.modules():  # .to(dtype) of a whole model is refused by some
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.is_floating_point():
                    tensor.grad = None
                    tensor.data = tensor.data.to(dtype)
    return twin


Convert = Callable[[nn.Module, Group], Any]  # by the plan, in place, for the ranks of a group


def difference_by_plan(model: nn.Module, convert: Convert, example_inputs: Any, group: Group) -> str:
    """Runs copies of `model`, some of them given to `convert`, and says where these are wrong; "" if nowhere.

    Raises:
        ValueError: no input to call the model with, a model on the meta device, one that draws random numbers, or one
            that gives no floating-point tensor.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("verify=True needs a model with values: some of its parameters are on the meta device")
    example = example_of(model, example_inputs, group)
    alone = Group(None, 0, 1)
    with _preserved_state(model):
        twin = _copied(model, torch.float64)
        with torch.no_grad():
            torch.manual_seed(1)
            first = _forward(twin, example, torch.float64)[0]
            torch.manual_seed(2)
            second = _forward(twin, example, torch.float64)[0]
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
            raise ValueError(
                "verify=True: the model's output differs from one call to the next (dropout, or other random numbers), "
                "so there is nothing to compare with: set dropout to 0, or call model.eval() first"
            )
        if not first:
            raise ValueError("verify=True: the model gives no floating-point tensor, so there is nothing to compare")
        exact = _run(twin, example, torch.float64, None, alone)
        twin = _copied(model, torch.float32)
        plain = _run(twin, example, torch.float32, exact, alone)
        twin.zero_grad(set_to_none=True)
        convert(twin, group)
        ours = _run(twin, example, torch.float32, exact, group)
        if (text := _verdict(twin, ours, plain, exact, group)) or group.size == 1 or not is_tp_invariant_mode_enabled():
            return text
        on_one = _copied(model, torch.float32)
        convert(on_one, alone)
        place = _other_bytes(twin, ours, _run(on_one, example, torch.float32, exact, alone), group)
        return place and f"{_BYTES} {place} has other bytes. {_BYTES_HINT}"


def check_plan(model: nn.Module, convert: Convert, example_inputs: Any, group: Group) -> None:
    """`difference_by_plan`, as an error that is the same on every rank. A collective.

    Raises:
        ValueError: some rank's results differ from the unsharded model's, or with the mode on in their bytes from those
            of one rank; see `difference_by_plan` for others.
    """
    mine = run_on_all_ranks(group, "verify=True", lambda: difference_by_plan(model, convert, example_inputs, group))
    verdicts = gather_objects(mine, group)
    wrong = [f"rank {rank} of {group.size}: {text}" for rank, text in enumerate(verdicts) if text]
    if wrong:
        bytes_alone = f": {_BYTES}" in wrong[0]
        does = "has other bytes by this plan than by the same on one rank" if bytes_alone else (
            "computes something else by this plan than unsharded"
        )  # fmt: skip
        raise ValueError(f"{type(model).__name__} {does}; nothing was changed.\n{wrong[0]}")
