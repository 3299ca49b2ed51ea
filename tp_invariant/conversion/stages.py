"""Cuts a causal language model of transformers into the stages of a pipeline, in place.

A stage has a run of consecutive decoder layers, the first one also the embedding, the last one the final norm and the
output layer. All else of the model stays on every stage (positions, masks, rotary embedding), and runs there: it has no
parameters. In the place of another stage's modules there are modules that pass their input on. So names, indices of
layers, and the hooks of sequence parallelism on the first layer and the final norm are those of the whole model.

What a model does between its embedding and its first layer (a scale), or between its norm and its output (a softcap),
runs on every stage too. There it is without effect: hidden states enter at the first layer, and leave at the norm.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.bits import leaves
from ..core.layout import split_sizes
from ..data_parallel.tied_stages import tie_stages
from ..layers.other_stage import leave_to_other_stage
from .survey import Stack


class _Found(NamedTuple):
    stack: Stack
    embedding: str
    output: str

    @classmethod
    def of(cls, model: Any) -> _Found | None:
        modules = dict(model.named_modules())
        names = {id(module): name for name, module in modules.items()}
        if (stack := Stack.find(modules)) is None or not hasattr(model, "get_output_embeddings"):
            return None
        ends = names.get(id(model.get_input_embeddings())), names.get(id(model.get_output_embeddings()))
        return None if None in ends else cls(stack, *ends)  # type: ignore[arg-type]

    def stage_of(self, name: str, stages: int) -> int | None:
        """The stage that holds the parameter `name`; None if every stage would."""
        if name.startswith(f"{self.embedding}."):
            return 0
        if name.startswith((f"{self.output}.", f"{self.stack.norm_name}.")):
            return stages - 1
        if not name.startswith(self.stack.prefix):
            return None
        index = int(name.removeprefix(self.stack.prefix).partition(".")[0])
        ends = itertools.accumulate(split_sizes(len(self.stack.layers), stages))
        return next(stage for stage, end in enumerate(ends) if index < end)


def problems_with_stages(model: nn.Module, stages: int) -> list[str]:
    """Why `model` cannot be cut into as many stages, one line for each reason; nothing is changed."""
    if stages == 1:
        return []
    found = _Found.of(model)
    if found is None:
        return [
            f"pp={stages}: {type(model).__name__} has no decoder layers (a module with `layers`, an nn.ModuleList, and "
            "`norm`) between an embedding and an output layer. Cut it yourself, and give parallelize each rank's stage"
        ]
    if len(found.stack.layers) < stages:
        return [f"pp={stages}: {len(found.stack.layers)} layers in {found.stack.prefix[:-1]} are fewer than stages"]
    problems, seen = [], dict[int, tuple[str, int]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = found.stage_of(name, stages)
        if stage is None:
            problems.append(f"pp={stages}: {name} is in no decoder layer, embedding, final norm or output layer")
            continue
        first, of_first = seen.setdefault(id(parameter), (name, stage))
        if stage != of_first and not (first.startswith(found.embedding) and name.startswith(found.output)):
            problems.append(f"pp={stages}: {first} and {name} are one parameter, in the stages {of_first} and {stage}")
    return problems


def cut_into_stages(model: Any, pp_group: Group) -> None:
    """Leaves this rank's stage of `model`. A collective of the ranks of pp_group, after `problems_with_stages`.

    Stage 0 takes token ids, others the hidden states [B, S, H] that the stage before returns. The last stage returns
    what the model does. Its weight, if it is the embedding's too, is a copy (data_parallel/tied_stages.py).
    """
    if pp_group.size == 1:
        return
    found = _Found.of(model)
    assert found is not None
    stack, own = found.stack, pp_group.rank
    weight, of_output = (model.get_submodule(name).weight for name in (found.embedding, found.output))
    if weight is of_output:
        tie_stages(weight, f"{found.embedding}.weight", pp_group)
        model.has_tied_stage = own in (0, pp_group.size - 1)
    layers = [f"{stack.prefix}{index}" for index in range(len(stack.layers))]
    stage_of = {
        n: found.stage_of(f"{n}.", pp_group.size) for n in (found.embedding, *layers, stack.norm_name, found.output)
    }
    for name, stage in stage_of.items():
        if stage != own:
            leave_to_other_stage(model.get_submodule(name))
    boundary = _Boundary(pp_group)
    model.register_forward_pre_hook(boundary.enter, with_kwargs=True)
    if own > 0:  # before sequence parallelism scatters
        stack.layers[0].register_forward_pre_hook(boundary.enter_layers, with_kwargs=True, prepend=True)
    if own < pp_group.size - 1:  # after it has gathered
        model.get_submodule(stack.norm_name).register_forward_hook(boundary.leave_layers)
        model.register_forward_hook(boundary.leave)
    first = model.get_submodule(next(name for name in layers if stage_of[name] == own))
    first.register_forward_pre_hook(boundary.check_arguments, with_kwargs=True)
    first.register_forward_hook(boundary.check_output)


class _Boundary:
    """Hooks that put hidden states into a stage's layers, and take them out."""

    def __init__(self, group: Group) -> None:
        self.stage = f"stage {group.rank} of {group.size}"
        self.is_first = group.rank == 0
        self.states: Tensor | None = None  # what has entered and not yet left

    def enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = {"use_cache": False, **kwargs}  # a stage has the keys of its own layers alone
        if self.is_first:
            return args, kwargs
        given = args[0] if args else kwargs.pop("input_ids", None)
        given = kwargs.get("inputs_embeds") if given is None else given
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.dim() != 3:
            what = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{self.stage} takes the hidden states [B, S, H] of the stage before, and got {what}")
        self.states = given
        return (None, *args[1:]), kwargs | {"inputs_embeds": given}

    def enter_layers(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return ((self.states, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": self.states})

    def leave_layers(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        self.states = output

    def leave(self, model: nn.Module, args: Any, output: Any) -> Tensor:
        states, self.states = self.states, None
        assert states is not None
        return states

    def check_arguments(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """What another stage has computed reaches this one in hidden states alone."""
        others = [*args[1:], {name: value for name, value in kwargs.items() if args or name != "hidden_states"}]
        if any(isinstance(x, Tensor) and x.requires_grad for _, x in leaves(others)):
            raise ValueError(
                f"{type(layer).__name__} takes more activations than its hidden states: a pipeline of its model's "
                "layers would lose them"
            )

    def check_output(self, layer: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"{type(layer).__name__} returns a {type(output).__name__}: only layers that return hidden states can "
                "be cut into stages"
            )
