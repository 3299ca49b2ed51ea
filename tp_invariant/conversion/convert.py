"""parallelize: the modules of a model swapped, by a plan, for this library's; a Hugging Face model brings its own.

First a survey (survey.py): what will take each module's place, and a list of all that cannot be honoured. Only if that
list is empty is anything changed. What keeps a whole model invariant:

    linear        nn.Linear -> tpi.Linear by its style; without one it stays whole, on invariant kernels
    embedding     nn.Embedding -> tpi.VocabParallelEmbedding, by rows or whole
    norm          -> ParallelNorm, which knows whether this rank has some of the tokens, or some of the heads
    activation    -> WholeVectors, see core/elementwise.py
    attention     -> tpi.attention, see attention_choice.py; a Hugging Face model's loss: hugging_face/models.py

With sequence_parallel the hidden states [B, S, H] are sharded along S from the first decoder layer to the last one.
Hooks scatter what the first layer gets, gather what a block gets (a module with column-parallel layers: attention,
MLP), since models take the sequence's length from that, and gather what the final norm returns; row-parallel layers
scatter. Positions, masks and logits see the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, resolve_group
from ..consistency.agreement import refuse
from ..consistency.same_weights import check_same_model
from ..core.identity import identify
from ..functional.attention_choice import SafeSdpa
from ..functional.regions import gather_sequence, scatter_sequence
from ..gemm.gemm_fn import GemmFn, bundled, check_callable
from ..hugging_face import models as hugging_face
from ..layers.replicate import place_whole
from ..layers.ties import ties_are_kept, ties_to_outside
from .gradient_flow import FirstForward
from .plan_check import check_plan, digest_of_tensors
from .plans import Part, own_plan
from .survey import SEQUENCE_DIM, Survey


def parallelize(
    model: nn.Module,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
    plan: Mapping[str, str | Part] | None = None,
    *,
    sequence_parallel: bool = False,
    gemm_fn: GemmFn | None = None,
    verify: bool = False,
    example_inputs: Any = None,
) -> nn.Module:
    """Swaps modules of `model`, in place, for tensor-parallel ones with this rank's part of their weights.

        model = tpi.parallelize(AutoModelForCausalLM.from_pretrained(..), tp_group)
        mlp = tpi.parallelize(nn.Sequential(..), tp_group, {"0": "colwise", "2": "rowwise"})

    Call it on every rank, also at TP=1, with the same full model, before the optimizer is made: a collective, which
    compares the ranks' weights before anything is changed (consistency/same_weights.py has its cost). Parameters keep
    their names, values, dtypes and ties; state_dict() has this rank's shards under the same keys. Inputs and outputs
    are whole and the same on every rank. The mode is read at every call: off, the same model runs stock tensor
    parallelism with its own attention.

    Args:
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1. Of a DeviceMesh every parameter of the model becomes
            a DTensor on it; modules that stay as they are see their local tensors (`replicate_`).
        plan: {pattern: style or Part}, see plans.py; None takes the plan that a Hugging Face model brings.
        sequence_parallel: shard the hidden states between decoder layers along the sequence, for models with
            `layers` and a final `norm`. The degree must divide the sequence, so not for decoding token by token.
        verify: run copies of the model first, with the plan and without, on the same input, forward and backward, and
            compare outputs and gradients; see plan_check.py. It finds what no look at the modules can: a fused
            projection whose output the model's code splits, a sum over features of which each rank has a part. The
            copies take 12 bytes of each parameter's element for a while; the model is not touched if they differ.
        example_inputs: what verify calls the model with: a tensor, a tuple of arguments, or a dict of them, the same on
            every rank. Token ids are made up for a Hugging Face model.
        gemm_fn: for all linear layers, as for Linear (attention has a kernel of its own; with a mask as a matrix it may
            take the process-wide or bundled one).

    Raises:
        ValueError: with one line for each thing that cannot be honoured, before anything is changed: unknown styles (of
            mixtures of experts, say), patterns of `plan` that match nothing, sizes or heads that the degree does not
            divide, modules of other classes, dropout, an attention that is forced and not safe. With verify, also the
            first module whose output or gradient differs from the unsharded model's, and by how much. Without it, the
            first forward that needs gradients names what would get a part of its gradient only (gradient_flow.py).
        RuntimeError: the same on every rank, before anything is changed: ranks with different weights, models or
            arguments.
    """
    group = resolve_group(tp_group)
    full_plan = own_plan(model) if plan is None else plan

    def look(at: nn.Module, gemm_fn: GemmFn | None, group: Group = group) -> Survey:
        survey = Survey(at, group, sequence_parallel, check_callable(gemm_fn), own_plan=plan is None)
        survey.run(full_plan)
        return survey

    survey = look(model, gemm_fn)
    survey.problems += ties_to_outside(model)
    if example_inputs is not None and not verify:
        survey.problems.append("example_inputs are what verify=True calls the model with: give both, or neither")
    facts = {
        "sequence_parallel": sequence_parallel,
        "gemm_fn": None if gemm_fn is None else identify(gemm_fn),
        "what parallelize cannot honour": survey.problems,
        "verify": verify,
        "example_inputs": digest_of_tensors(example_inputs),
        **{f"the plan of {name}": str(part) for name, part in survey.parts.items()},
    }
    error = ValueError(
        f"{type(model).__name__} cannot be made tensor-parallel over {survey.group.size} ranks; nothing was "
        "changed:\n" + "\n".join(f"  {problem}" for problem in survey.problems)
    )
    if survey.distributed:  # other ranks hold other parts of it, so that there is nothing to compare
        refuse(error, group, torch.device("cpu"), set())
    else:
        check_same_model(model, group, facts)
    if survey.problems:
        raise error
    if verify:
        bundled_fn = bundled()  # float32 is none of what a gemm_fn of the caller's must take
        alike = replace(group, mesh=None)  # plain tensors, which are compared as they are
        check_plan(model, lambda twin: _convert(twin, look(twin, bundled_fn, alike)), example_inputs, group)
    _convert(model, survey)
    if group.mesh is not None:
        place_whole(model, group.mesh)
    FirstForward(model, group)
    return model


def _convert(model: nn.Module, survey: Survey) -> nn.Module:
    """What the survey found to be done, to the model that it looked at."""
    _swap(model, survey.swaps)
    if survey.is_hugging_face:
        hugging_face.install(model, survey.group.size)
        # attention of a model's own that asks no interface; the output layer stands in the model itself
        linears = [name for name, part in survey.parts.items() if part.linear_options() and "." in name]
        callers = _callers(model, linears)
    else:
        callers = _callers(model, survey.swaps) | {id(model): model}
    for caller in callers.values():
        SafeSdpa(caller)
    if survey.stack is not None:
        hooks = _SequenceHooks(survey.group if survey.sequence_parallel else Group(None, 0, 1))
        survey.stack.layers[0].register_forward_pre_hook(hooks.scatter, with_kwargs=True)
        norm = model.get_submodule(survey.stack.norm_name)
        for name in survey.blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(hooks.enter_block, with_kwargs=True)
            if hooks.group.size > 1 and name in survey.whole_blocks:
                block.register_forward_hook(hooks.leave_block)
        if hooks.group.size > 1:
            owner = model.get_submodule(survey.stack.norm_name.rpartition(".")[0])
            owner.register_forward_pre_hook(hooks.start)
            owner.register_forward_hook(hooks.gather_hidden_states)
            norm.register_forward_pre_hook(hooks.scatter_before_layers)
        norm.register_forward_hook(hooks.gather)
    return model


def _swap(model: nn.Module, swaps: Mapping[str, Callable[[], nn.Module]]) -> None:
    """Puts the new modules in the old ones' places; parameters that were one stay one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # a module may stand in several
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((parent, name))
    tied: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one too, so that its id stays its own
    for name, make in swaps.items():
        old = model.get_submodule(name)
        with ties_are_kept():
            new = make()
        for key, parameter in old.named_parameters(recurse=False):
            if id(parameter) in tied:
                setattr(new, key, tied[id(parameter)][1])
            elif isinstance(made := getattr(new, key, None), nn.Parameter):
                tied[id(parameter)] = parameter, made
        for parent, attribute in places[id(old)]:
            setattr(parent, attribute, new)


def _callers(model: nn.Module, names: Iterable[str]) -> dict[int, nn.Module]:
    """By id, the modules whose forward calls the named ones: where attention happens."""
    found = {}
    for name in names:
        while name := name.rpartition(".")[0]:
            parent = model.get_submodule(name)
            if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)):  # these have no forward of their own
                found[id(parent)] = parent
                break
    return found


class _SequenceHooks:
    """Into the sequence-parallel region and its blocks, and out of it; nothing moves in a group of one.

    `inside`: whether the hidden states are sharded now, which they are from the first layer to the final norm. A model
    may use that norm before its layers, too; it then gets this rank's tokens as well, and its output is gathered.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.inside = False
        self.tokens = 0  # of this rank's part of the sequence, in the latest forward

    def start(self, owner: nn.Module, args: Any) -> None:
        self.inside = False  # an earlier forward may have ended in an error

    def scatter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = _with_first(scatter_sequence, self.group, args, kwargs)
        if self.group.size > 1:
            self.inside, self.tokens = True, (args[0] if args else kwargs["hidden_states"]).shape[SEQUENCE_DIM]
        return args, kwargs

    def enter_block(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return _with_first(_gather_into_block, self.group, args, kwargs)

    def leave_block(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Of a block that gathers its features itself: no row-parallel layer has scattered the tokens."""
        if isinstance(output, tuple):
            return scatter_sequence(output[0], self.group, SEQUENCE_DIM), *output[1:]
        return scatter_sequence(output, self.group, SEQUENCE_DIM)

    def scatter_before_layers(self, norm: nn.Module, args: tuple) -> tuple:
        return args if self.inside else (scatter_sequence(args[0], self.group, SEQUENCE_DIM), *args[1:])

    def gather(self, norm: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.group.size > 1:
            self.inside = False
        return gather_sequence(output, self.group, SEQUENCE_DIM)

    def gather_hidden_states(self, owner: nn.Module, args: Any, output: Any) -> Any:
        """Makes whole the hidden states of each layer (output_hidden_states=True) that are this rank's tokens."""
        if isinstance(output, tuple):
            return tuple(self._whole(x) if isinstance(x, tuple) else x for x in output)
        if isinstance(states := getattr(output, "hidden_states", None), tuple):
            output.hidden_states = self._whole(states)
        return output

    def _whole(self, states: tuple) -> tuple:
        return tuple(
            gather_sequence(x, self.group, SEQUENCE_DIM)
            if isinstance(x, Tensor) and x.dim() == 3 and x.shape[SEQUENCE_DIM] == self.tokens
            else x
            for x in states
        )


def _gather_into_block(x: Tensor, group: Group, dim: int) -> Tensor:
    """Also a node of its own in the graph, with or without sequence parallelism: so autograd adds the gradients of the
    block's uses of x to each other first, and to the residual's after, in one order at every degree."""
    return gather_sequence(x.view_as(x), group, dim)


def _with_first(move: Callable, group: Group, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a layer or block with its hidden states moved: the first one, or that of this name."""
    if args:
        return (move(args[0], group, SEQUENCE_DIM), *args[1:]), kwargs
    if "hidden_states" not in kwargs:
        raise TypeError(f"hidden states must come first or as hidden_states=..; got {', '.join(kwargs) or 'nothing'}")
    return args, {**kwargs, "hidden_states": move(kwargs["hidden_states"], group, SEQUENCE_DIM)}
