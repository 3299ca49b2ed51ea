"""parallelize: makes a model's modules this library's, according to a plan; Hugging Face models have a plan.

First a survey (survey.py) determines what each module becomes, and lists everything that cannot be done. Only if
that list is empty is the model changed. The parts of an invariant model:

    linear        nn.Linear -> tpi.Linear by its style; without a style it is replicated, on invariant kernels
    embedding     nn.Embedding -> tpi.VocabParallelEmbedding, sharded by rows or replicated
    norm          -> ParallelNorm, which knows whether its input is sharded by tokens or by heads
    activation    stays; the functions that it calls are replaced, see attention_choice.py
    experts       -> Experts; the router's code stays, see hugging_face/experts.py
    parameter     of a module that stays (attention sinks): this rank's part, see layers/local_parameters.py
    attention     -> tpi.attention, see attention_choice.py; a Hugging Face model's loss: hugging_face/models.py

With sequence_parallel the hidden states [B, S, H] are sharded along S from the first decoder layer to the last one.
Hooks scatter the input of the first layer, gather the input of each block (a module with column-parallel layers:
attention, MLP), because models read the sequence's length from it, and gather the output of the final norm;
row-parallel layers scatter. Positions, masks and logits have the full sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, ranks_of, resolve_group
from ..consistency.agreement import numbers_given_back, share_error
from ..consistency.same_weights import check_same_model
from ..core.bits import digest, leaves
from ..core.identity import identify
from ..core.module_hooks import with_key
from ..core.parameter_names import name_parameters
from ..functional.attention_choice import SafeSdpa, callers
from ..functional.regions import gather_for_layers, gather_sequence, scatter_sequence
from ..gemm.gemm_fn import GemmFn, bundled, check_signature
from ..hugging_face import fused
from ..hugging_face import models as hugging_face
from ..hugging_face.experts import SafeRouting
from ..hugging_face.shared_keys import SharedKeys
from ..layers.experts import check_replicas_of
from ..layers.in_place import all_or_nothing, convert, held_outside, problems_in_place
from ..layers.other_stage import stages_of
from ..layers.parameters import ShardedModule
from ..layers.replicate import place_whole
from ..layers.sequence_chunks import ChunkedSequence, cut_by_chunk, problems_by_chunk
from .gradient_flow import FirstForward, check_mask
from .mesh_dims import MeshDims, install_over_cp, one_dim_of, problems_over_cp
from .plan_check import check_plan
from .plans import Part, own_plan
from .stages import cut_into_stages, problems_with_stages
from .survey import SEQUENCE_DIM, Survey


@numbers_given_back()
def parallelize(
    model: nn.Module,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    plan: Mapping[str, str | Part] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    sequence_chunks: int = 1,
    stages_per_rank: int = 1,
    sequence_parallel: bool = False,
    gemm_fn: GemmFn | None = None,
    expert_parallel_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    verify: bool = False,
    example_inputs: Any = None,
) -> nn.Module:
    """Makes modules of `model` tensor-parallel where they stand, with this rank's part of their weights.

        model = tpi.parallelize(AutoModelForCausalLM.from_pretrained(..), tp_group)
        mlp = tpi.parallelize(nn.Sequential(..), tp_group, {"0": "colwise", "2": "rowwise"})

    Call it on every rank, also at TP=1, with the same full model. It is a collective: it compares the ranks' weights
    before it changes anything (consistency/same_weights.py states the cost). Modules stay the same objects, of classes
    derived from their own. With a ProcessGroup parameters do, too, and get this rank's part of their values and
    gradients, so that an optimizer may have been made before. One that has made a step has state for whole parameters,
    and raises at its next step. Parameters keep their names, attributes, dtypes and ties; state_dict() has this rank's
    shards under the same keys. Inputs and outputs of the model are full tensors, the same on every rank. The mode is
    read at every call: if it is off, the model runs stock tensor parallelism with its own attention. If it fails on any
    rank, the model is on all ranks as it was.

    Args:
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1. Of a DeviceMesh a DTensor on it takes the place, the
            attributes and the gradient of every parameter of the model, so make the optimizer afterwards: one that
            holds a former parameter raises at its first step. Modules that stay as they are see their local tensors
            (`replicate_`).
        plan: {pattern: style or Part}, see plans.py; None: the plan of a Hugging Face model.
        mesh: in place of tp_group, a DeviceMesh whose dims are among pp, dp, cp and tp (docs/layouts.md). All its ranks
            hold the same model. With "cp" each rank is called with its part of every sequence (`tpi.sequence_part`);
            MicroBatchTree(.., mesh=mesh) completes the gradients. A model of one's own that calls tpi.attention gives
            it cp_group itself; F.scaled_dot_product_attention is given it here. With "pp" a Hugging Face model keeps
            this rank's stage alone: the first takes token ids, the others hidden states [B, S, H], and all but the last
            return hidden states (data_parallel.Stage). Of a model of one's own each rank gives its stage.
        sequence_chunks: into how many chunks each sequence is cut, at every layout: a gradient is one partial sum for
            each, see `context_parallel_`. The degree of "cp" must divide it.
        stages_per_rank: of a Hugging Face model with "pp": how many runs of its layers a rank has, for interleaved
            schedules. Run k of the pipeline is on rank k modulo the degree of "pp". The model then has the modules of
            this rank's runs; call each as a module of its own (`data_parallel.stages_of`).
        sequence_parallel: shard the hidden states between decoder layers along the sequence, for models with
            `layers` and a final `norm`. The degree must divide the sequence length where there are gradients. Without,
            calls of other lengths, such as generate's, run without sequence parallelism.
        expert_parallel_group: of a mixture of experts: store the weights of experts by expert over this group, instead
            of by their inner features. It has the ranks of tp_group, or those of several data-parallel replicas, which
            then must call parallelize together and with the same model; see Experts. With `mesh`: mesh["tp"], or
            mesh["dp", "tp"], a DeviceMesh of two dims, which stands for all its ranks in order.
        verify: first run copies of the model, with the plan and without, on the same input, forward and backward, and
            compare outputs and gradients, with the mode on also their bytes with those of one rank; see plan_check.py.
            This detects errors that cannot be seen in the modules: a fused projection whose output the model's code
            splits, a sum over features that are sharded, or one over tokens whose order depends on the degree. While it
            runs, the copies and their gradients take some 50 bytes for each element of each parameter on each rank; if
            they differ, the model is not changed.
        example_inputs: the arguments with which verify calls the model: a tensor, a tuple of arguments, or a dict of
            them, the same on every rank. For a Hugging Face model the default is random token ids.
        gemm_fn: for all linear layers, as for Linear (attention has its own kernel).

    Raises:
        ValueError: before anything is changed, with one line for each thing that cannot be done: unknown styles (of
            mixtures of experts, say), patterns of `plan` that match nothing, sizes or heads that the degree does not
            divide, modules of other classes, an attention implementation that is not invariant; and an autograd graph
            that is alive and has a whole parameter of which ranks get parts. With verify, also the first module whose
            output or gradient differs from the unsharded model's, and by how much, or has other bytes than on one rank.
            Without verify, the first forward that needs gradients names each parameter whose gradient would be
            incomplete (gradient_flow.py). A forward in training that draws a dropout mask for this rank's part of the
            activations.
        RuntimeError: the same on every rank, before anything is changed: ranks with different weights, models or
            arguments.
    """
    dims = MeshDims() if mesh is None else MeshDims.of(mesh, tp_group)
    group = resolve_group(tp_group) if mesh is None else dims.tp
    sequence = ChunkedSequence(dims.cp, sequence_chunks, SEQUENCE_DIM, type(model).__name__)
    if mesh is not None:
        of_experts = getattr(expert_parallel_group, "mesh_dim_names", type(expert_parallel_group).__name__)
        dims.check_alike("expert_parallel_group", of_experts)
    if isinstance(expert_parallel_group, DeviceMesh) and expert_parallel_group.ndim > 1:
        expert_parallel_group = one_dim_of(expert_parallel_group)
    stored_over = None if expert_parallel_group is None else resolve_group(expert_parallel_group)
    everyone = group  # all ranks that have a part of the model, or the same one
    if stored_over is not None:
        if group.size == 1 and group.mesh is None:  # then no parameter is a DTensor
            stored_over = replace(stored_over, mesh=None)
        if mesh is not None:
            dims.check_experts(mesh, ranks_of(stored_over))
        check_replicas_of(group, stored_over)
        everyone = stored_over if stored_over.size > group.size else group
    full_plan = own_plan(model) if plan is None else plan

    def survey_of(
        at: nn.Module, gemm_fn: GemmFn | None, group: Group = group, stored_over: Group | None = stored_over
    ) -> Survey:
        survey = Survey(at, group, sequence_parallel, check_signature(gemm_fn), plan is None, stored_over)
        survey.run(full_plan)
        return survey

    survey = survey_of(model, gemm_fn)
    if not survey.problems:
        survey.problems += problems_in_place(model, survey.layers, group) + held_outside(model, survey.layers, group)
    if example_inputs is not None and not verify:
        survey.problems.append("example_inputs are what verify=True calls the model with: give both, or neither")
    if sequence_chunks > 1:
        survey.problems += problems_by_chunk(model, dims.cp, survey.shards)
    if survey.is_hugging_face:
        survey.problems += problems_over_cp(model, dims.cp, survey.attention_stays)
    stages = dims.pp if survey.is_hugging_face else Group(None, 0, 1)  # of another model each rank gives its own stage
    if survey.is_hugging_face or stages_per_rank == 1:
        survey.problems += problems_with_stages(model, stages.size, stages_per_rank)
    else:
        survey.problems.append(
            f"stages_per_rank={stages_per_rank}: {type(model).__name__} is no model of transformers. Cut it yourself, "
            "and give parallelize each stage of this rank"
        )
    facts = {
        "sequence_chunks": sequence_chunks,
        "stages_per_rank": stages_per_rank,
        "sequence_parallel": sequence_parallel,
        "gemm_fn": None if gemm_fn is None else identify(gemm_fn),
        "what parallelize cannot honour": survey.problems,
        "over how many ranks experts are stored by expert": None if stored_over is None else stored_over.size,
        "verify": verify,
        "example_inputs": digest([x for _, x in leaves(example_inputs) if isinstance(x, Tensor)]),
        **{f"the plan of {name}": str(part) for name, part in {**survey.parts, **survey.parameter_parts}.items()},
    }
    error = ValueError(
        f"{type(model).__name__} cannot be made tensor-parallel over {survey.group.size} ranks; nothing was "
        "changed:\n" + "\n".join(f"  {problem}" for problem in survey.problems)
    )
    twice = survey.problems and any(isinstance(module, ShardedModule) for module in model.modules())
    if survey.distributed or twice:  # ranks hold different parts of the model, so weights cannot be compared
        share_error(error, everyone, torch.device("cpu"), set())
    elif mesh is None:
        check_same_model(model, everyone, facts, error=error if survey.problems else None)
    else:
        dims._replace(pp=stages).check_same(model, facts)
    if survey.problems:
        raise error
    if verify:
        bundled_fn = bundled()  # the check runs in float32, which a user's gemm_fn need not accept
        alike = replace(group, mesh=None)  # plain tensors, which are compared as they are
        by_expert = None if stored_over is None else alike  # not over data: the copies get the same input on each rank

        def convert(twin: nn.Module, over: Group) -> None:
            several = over.size > 1
            _convert(twin, survey_of(twin, bundled_fn, alike if several else over, by_expert if several else None))

        check_plan(model, convert, example_inputs, group)
    with all_or_nothing(model, everyone):
        _convert(model, survey, sequence)
        if group.mesh is not None:
            place_whole(model, group.mesh)
        if sequence_chunks > 1:
            cut_by_chunk(model, sequence)
        if stages_per_rank == 1:
            FirstForward(model, group)
    name_parameters(model.named_parameters())
    cut_into_stages(model, stages, stages_per_rank)
    for stage in stages_of(model) if stages_per_rank > 1 else ():
        FirstForward(stage, group)
    return model


def _convert(model: nn.Module, survey: Survey, sequence: ChunkedSequence | None = None) -> None:
    """Changes the model as its survey says. sequence: of a model over a mesh."""
    cp_group = None if sequence is None else sequence.group
    convert(model, survey.layers)
    for name in survey.latents:
        SharedKeys(model.get_submodule(name), survey.group)
    for name in survey.mixtures:
        SafeRouting(model.get_submodule(name), survey.gemm_fn)
    for name in survey.activations:
        SafeSdpa(model.get_submodule(name), cp_group=cp_group)
    if survey.is_hugging_face:
        hugging_face.install(model, survey.attention_stays)
        fused.install(model)
        if sequence is not None:
            install_over_cp(model, sequence.group)
        # for attention in a model's own code, which does not use the interface; without the output layer's caller
        linears = [name for name, part in survey.parts.items() if part.linear_options() and "." in name]
        attending = callers(model, linears)
        around = [name for name, module in model.named_modules() if id(module) in attending]
        attending |= callers(model, around)  # which may hold dropout between the blocks
    else:
        attending = callers(model, survey.layers) | {id(model): model}
    for caller in attending.values():
        SafeSdpa(caller, partial(check_mask, survey.group, cp_group=cp_group), cp_group)
    if survey.stack is not None:
        hooks = _SequenceHooks(survey.group if survey.sequence_parallel else Group(None, 0, 1), sequence)
        with_key(survey.stack.layers[0].register_forward_pre_hook(hooks.scatter, with_kwargs=True), "sequence")
        norm = model.get_submodule(survey.stack.norm_name)
        for name in survey.blocks:
            block = model.get_submodule(name)
            unsharded = name in survey.unsharded
            enter = hooks.enter_unsharded_block if unsharded else hooks.enter_block
            with_key(block.register_forward_pre_hook(enter, with_kwargs=True), "sequence")
            if hooks.group.size > 1 and name in survey.whole_blocks:
                with_key(block.register_forward_hook(hooks.leave_block, with_kwargs=True), "sequence")
        if hooks.group.size > 1:
            owner = model.get_submodule(survey.stack.norm_name.rpartition(".")[0])
            with_key(owner.register_forward_pre_hook(hooks.start, with_kwargs=True), "sequence")
            with_key(owner.register_forward_hook(hooks.gather_hidden_states), "sequence")
            with_key(norm.register_forward_pre_hook(hooks.scatter_before_layers, with_kwargs=True), "sequence")
        with_key(norm.register_forward_hook(hooks.gather), "sequence")


class _SequenceHooks:
    """Hooks that scatter and gather hidden states around the sequence-parallel region and its blocks.

    In a group of one rank nothing is moved. `inside`: whether the hidden states are sharded now, as they are from the
    first layer to the final norm. A model may call that norm before its layers too; then the hooks scatter the norm's
    input and gather its output.

    Where the degree does not divide the sequence, a forward without gradients runs without sequence parallelism (a
    prompt of any length), and so does one of fewer tokens than ranks (decoding).

    chunks: where gradients are sums for each of several chunks of the sequence, each chunk is scattered and gathered by
    itself: a rank's tokens are its part of chunk 0, its part of chunk 1, and so on.
    """

    def __init__(self, group: Group, chunks: ChunkedSequence | None = None) -> None:
        self.over = self.group = group  # `group` has one rank in a forward without sequence parallelism
        self.chunks = chunks
        self.whole: dict[int, list[Any]] = {}  # of each stage (id of the layers' owner) those that run without it
        self.inside = False
        self.tokens = 0  # of this rank's part of the sequence, in the latest forward

    def start(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.inside = False  # an earlier forward may have ended in an error
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        x = next((x for x in given if isinstance(x, Tensor) and x.dim() > SEQUENCE_DIM), None)
        if x is None:
            return
        tokens, ranks = x.shape[SEQUENCE_DIM], self.over.size
        shards = tokens % ranks == 0 or (tokens > ranks and torch.is_grad_enabled())
        if self.group is self.over if shards else id(owner) in self.whole:
            return
        if not shards:
            self.whole[id(owner)] = [layer for layer in owner.modules() if getattr(layer, "sequence_parallel", False)]
        self.group = self.over if shards else Group(None, 0, 1)
        for layer in itertools.chain(*self.whole.values()):
            layer.sequence_parallel = shards
        if shards:
            self.whole.clear()

    def _along(self, move: Callable[..., Tensor], x: Tensor) -> Tensor:
        pieces = 1 if self.chunks is None or self.group.size == 1 or self.chunks.held == 1 else self.chunks.pieces
        if pieces == 1:
            return move(x, self.group, SEQUENCE_DIM)
        try:
            moved = move(x.unflatten(SEQUENCE_DIM, (pieces, -1)), self.group, SEQUENCE_DIM + 1)
        except ValueError as error:
            if not (tokens := x.shape[SEQUENCE_DIM]) % (pieces * self.group.size):
                raise
            raise ValueError(
                f"x on rank {self.group.rank} has {tokens} tokens of each sequence in {pieces} chunks "
                f"(sequence_chunks), each of which sequence parallelism divides over TP degree={self.group.size}: the "
                f"number of tokens of a rank must be a multiple of {pieces * self.group.size}"
            ) from error
        return moved.flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)

    def _scattered(self, x: Tensor) -> Tensor:
        return self._along(scatter_sequence, x)

    def scatter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = _with_first(self._scattered, args, kwargs)
        if self.group.size > 1:
            self.inside, self.tokens = True, _first(args, kwargs).shape[SEQUENCE_DIM]
        return args, kwargs

    def enter_block(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return _with_first(partial(self._along, _gather_into_block), args, kwargs, everywhere=True)

    def enter_unsharded_block(
        self, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """For a block in which the plan shards nothing: whether hidden states come first, nothing has said."""
        first = _first(args, kwargs)
        if isinstance(first, Tensor) and first.dim() == 3:
            return self.enter_block(block, args, kwargs)
        if self.group.size == 1:
            return args, kwargs
        what = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        raise ValueError(
            f"{type(block).__name__} is whole on every rank, so that sequence_parallel gathers its hidden states "
            f"[B, S, H]: they must come first, or as hidden_states=.., and it got {what}. Use sequence_parallel=False"
        )

    def leave_block(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """For a block that gathers its features itself, so that no row-parallel layer has scattered the tokens.

        Raises:
            ValueError: its output does not have the tokens of its input in dims 0 and 1.
        """
        whole, first = (output[0] if isinstance(output, tuple) and output else output), _first(args, kwargs)
        if not isinstance(whole, Tensor) or whole.shape[:2] != first.shape[:2]:
            what = f"of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
            raise ValueError(
                f"{type(block).__name__} got all tokens of hidden states [B, S, H] on rank {self.group.rank}, of shape "
                f"{tuple(first.shape)}, and sequence_parallel scatters what it puts out: that must begin with the same "
                f"B and S, and is {what}. Use sequence_parallel=False"
            )
        part = self._scattered(whole)
        return (part, *output[1:]) if isinstance(output, tuple) else part

    def scatter_before_layers(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return (args, kwargs) if self.inside else _with_first(self._scattered, args, kwargs)

    def gather(self, norm: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.group.size > 1:
            self.inside = False
        return self._along(gather_for_layers, output)

    def gather_hidden_states(self, owner: nn.Module, args: Any, output: Any) -> Any:
        """Gathers the layers' hidden states (output_hidden_states=True) that have only this rank's tokens."""
        if isinstance(output, tuple):
            return tuple(self._whole(x) if isinstance(x, tuple) else x for x in output)
        if isinstance(states := getattr(output, "hidden_states", None), tuple):
            output.hidden_states = self._whole(states)
        return output

    def _whole(self, states: tuple) -> tuple:
        """They lie beside the model's path, so that they have no gradient to retain."""
        return tuple(
            self._along(gather_sequence, x)
            if isinstance(x, Tensor) and x.dim() == 3 and x.shape[SEQUENCE_DIM] == self.tokens
            else x
            for x in states
        )


def _gather_into_block(x: Tensor, group: Group, dim: int) -> Tensor:
    """gather_for_layers with its own node in the autograd graph, also without sequence parallelism.

    So autograd first adds the gradients from the block's uses of x, and then the residual's: one order at every degree.
    """
    return gather_for_layers(x.view_as(x), group, dim)


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The hidden states among the arguments of a layer or block: the first one, `hidden_states`, or the only one."""
    return args[0] if args else kwargs.get(_name_of_first(kwargs))


def _name_of_first(kwargs: dict[str, Any]) -> str:
    return next(iter(kwargs)) if len(kwargs) == 1 else "hidden_states"


def _with_first(
    move: Callable[[Tensor], Tensor], args: tuple, kwargs: dict[str, Any], *, everywhere: bool = False
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a layer or block after `move` of its hidden states.

    everywhere: they are replaced wherever the same tensor is given, as in attention(x, x, x).
    """
    name = _name_of_first(kwargs)
    if not args and name not in kwargs:
        raise TypeError(f"hidden states must come first or as hidden_states=..; got {', '.join(kwargs) or 'nothing'}")
    first = _first(args, kwargs)
    moved = move(first)
    if everywhere:
        return tuple(moved if x is first else x for x in args), {
            k: moved if x is first else x for k, x in kwargs.items()
        }
    return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, name: moved})
