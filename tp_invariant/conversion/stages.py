"""Cuts a causal language model of transformers into the stages of a pipeline, in place.

A stage has a run of consecutive decoder layers, the first one also the embedding, the last one the final norm and the
output layer. All else of the model stays on every stage (positions, masks, rotary embedding), and runs there: it has no
parameters. In the place of another stage's modules there are modules that pass their input on. So names, indices of
layers, and the hooks of sequence parallelism on the first layer and the final norm are those of the whole model.

With several stages on a rank the model keeps the modules of all of them. Each stage is a copy of the model that shares
its own modules with it (layers/other_stage.py), and is cut as one stage of a rank is.

What a model does between its embedding and its first layer (a scale), or between its norm and its output (a softcap),
runs on every stage too. There it is without effect: hidden states enter at the first layer, and leave at the norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.bits import leaves
from ..core.layout import split_sizes
from ..data_parallel.tied_stages import tie_stages
from ..layers.other_stage import copy_apart, leave_to_other_stage
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


def problems_with_stages(model: nn.Module, ranks: int, per_rank: Any = 1) -> list[str]:
    """Why `model` cannot be cut into as many stages, one line for each reason; nothing is changed."""
    if not isinstance(per_rank, int) or isinstance(per_rank, bool) or per_rank < 1:
        return [f"stages_per_rank={per_rank!r}: it must be an int, and at least 1"]
    begin, stages = f"pp={ranks}" + (f", stages_per_rank={per_rank}" if per_rank > 1 else ""), ranks * per_rank
    if stages == 1:
        return []
    found = _Found.of(model)
    if found is None:
        return [
            f"{begin}: {type(model).__name__} has no decoder layers (a module with `layers`, an nn.ModuleList, and "
            "`norm`) between an embedding and an output layer. Cut it yourself, and give parallelize each rank's stage"
        ]
    if len(found.stack.layers) < stages:
        return [f"{begin}: {len(found.stack.layers)} layers in {found.stack.prefix[:-1]} are fewer than stages"]
    problems, seen = [], dict[int, tuple[str, int]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = found.stage_of(name, stages)
        if stage is None:
            problems.append(f"{begin}: {name} is in no decoder layer, embedding, final norm or output layer")
            continue
        first, of_first = seen.setdefault(id(parameter), (name, stage))
        tied = first.startswith(found.embedding) and name.startswith(found.output)
        if stage != of_first and not (tied and ranks > 1):
            advice = ", and on one rank: give stages_per_rank=1" if tied else ""
            problems.append(
                f"{begin}: {first} and {name} are one parameter, in the stages {of_first} and {stage}{advice}"
            )
    return problems


def cut_into_stages(model: Any, pp_group: Group, per_rank: int = 1) -> None:
    """Leaves this rank's stages of `model`. A collective of the ranks of pp_group, after `problems_with_stages`.

    Stage 0 takes token ids, others the hidden states [B, S, H] that the stage before returns. The last stage returns
    what the model does. Its weight, if it is the embedding's too, is a copy (data_parallel/tied_stages.py).
    """
    stages = pp_group.size * per_rank
    if stages == 1:
        return
    found = _Found.of(model)
    assert found is not None
    weight, of_output = (model.get_submodule(name).weight for name in (found.embedding, found.output))
    tied = weight is of_output
    if tied:
        tie_stages(weight, f"{found.embedding}.weight", pp_group)
    layers = [f"{found.stack.prefix}{index}" for index in range(len(found.stack.layers))]
    cut = (found.embedding, *layers, found.stack.norm_name, found.output)
    stage_of = {name: found.stage_of(f"{name}.", stages) for name in cut}
    own = range(pp_group.rank, stages, pp_group.size)
    of_rank = [model]
    if per_rank > 1:
        of_rank = [copy_apart(model, [name for name, stage in stage_of.items() if stage != number]) for number in own]
    for number, part in zip(own, of_rank, strict=True):
        if tied:
            part.has_tied_stage = number in (0, stages - 1)
        _cut(part, number, stages, stage_of, layers, found.stack.norm_name)
    if per_rank > 1:
        for name, stage in stage_of.items():
            if stage not in own:
                leave_to_other_stage(model.get_submodule(name))
        model.stages_of_rank = of_rank
        if pp_group.size > 1:
            model.register_forward_pre_hook(_refuse_several, prepend=True)


def _cut(part: Any, number: int, stages: int, stage_of: Mapping[str, int | None], layers: list[str], norm: str) -> None:
    """Makes a whole model, of which `layers` and `norm` are names, the stage `number`."""
    part.pipeline_stage = number, stages
    for name, stage in stage_of.items():
        if stage != number:
            leave_to_other_stage(part.get_submodule(name))
    boundary = _Boundary(number, stages)
    part.register_forward_pre_hook(boundary.enter, with_kwargs=True)
    if number > 0:  # before sequence parallelism scatters
        first = part.get_submodule(layers[0])
        first.register_forward_pre_hook(boundary.enter_layers, with_kwargs=True, prepend=True)
    if number < stages - 1:  # after it has gathered
        part.get_submodule(norm).register_forward_hook(boundary.leave_layers)
        part.register_forward_hook(boundary.leave)
    first = part.get_submodule(next(name for name in layers if stage_of[name] == number))
    first.register_forward_pre_hook(boundary.check_arguments, with_kwargs=True)
    first.register_forward_hook(boundary.check_output)


def _refuse_several(model: Any, args: tuple) -> None:
    numbers = [part.pipeline_stage[0] for part in model.stages_of_rank]
    of = model.stages_of_rank[0].pipeline_stage[1]
    raise ValueError(
        f"{type(model).__name__} has the stages {numbers} of {of} on this rank, and each is called by itself: "
        "tp_invariant.data_parallel.stages_of(model) has them"
    )


class _Boundary:
    """Hooks that put hidden states into a stage's layers, and take them out."""

    def __init__(self, number: int, stages: int) -> None:
        self.stage = f"stage {number} of {stages}"
        self.is_first = number == 0
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
