"""Gradients by chunks of the sequence: the sums over tokens of context parallelism, the same bits at every degree.

Each sequence is cut into C consecutive chunks of equal length, at every degree. A rank of cp_group holds n = C / cp of
them, and a parameter's gradient is one partial sum for each, which data_parallel.MicroBatchTree adds in its order.

    n = 1    .grad is that partial sum, and modules compute as without chunks
    n > 1    a module that has parameters cuts its inputs along the sequence, computes chunk by chunk, each with aliases
             of its parameters, and concatenates. An alias is a leaf that shares the parameter's memory, so that
             autograd accumulates a gradient for each chunk. Outputs have the same bits: kernels are slice-invariant.

The gradients of the chunks wait in the parameter's attribute `chunk_gradients`. Until MicroBatchTree takes them,
`.grad` is the placeholder of functional/partial_gradients.py: zero_grad() drops them, and what reads it gets NaN.

Legend: B sequences, S tokens of each on this rank, P ranks of tensor parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..comm.collectives import Group, ranks_of, resolve_group
from ..consistency.same_weights import check_same_model
from ..core.derived_class import derived_class
from ..core.dtensors import grad_like, is_dtensor, local_of
from ..core.graph_breaks import outside_of_graphs
from ..core.module_hooks import has_own_forward, with_key
from ..core.parameter_names import label_of
from ..core.torch_private import current_backward, tree
from ..functional.partial_gradients import PartialGradients, PartialGradientsOfChunk
from .local_parameters import PartsOfForeignModule
from .parameters import KeepsAttributes, ShardedModule, carried_group, is_over_data
from .vocab_embedding import VocabParallelEmbedding

# modules of torch's that combine tokens, or do not have the features last
_ACROSS_TOKENS = (
    nn.MultiheadAttention, nn.RNNBase, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d,
)  # fmt: skip


@dataclass(frozen=True)
class Chunks:
    """What a parameter says of its gradient, in the attribute `sequence_chunks`: a partial sum for each chunk.

    of: C. group: over whose ranks the chunks are divided. whole: the gradient is one sum over all chunks, the same on
    every rank of the group.
    """

    group: Group
    of: int
    whole: bool = False

    @property
    def held(self) -> int:
        """n, the number of chunks of a rank."""
        return self.of // self.group.size

    def on(self, rank: int) -> range:
        """The chunks of a rank of the group."""
        return range(rank * self.held, (rank + 1) * self.held)


torch.serialization.add_safe_globals([Chunks])


def chunks_of(parameter: Tensor) -> Chunks | None:
    """What `context_parallel_` has set."""
    return getattr(parameter, "sequence_chunks", None)


def say_summed(grad: Tensor) -> None:
    """Of a gradient that is the sum over all chunks."""
    grad.summed_over_chunks = True  # type: ignore[attr-defined]


_checked = "_tp_invariant_summed_over_chunks"  # of an optimizer whose first step was


def _refuse_partial_sums(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of each optimizer's first step. Without MicroBatchTree the weights of the ranks would part silently.

    Raises:
        RuntimeError: a gradient is of a rank's chunks alone.
    """
    if torch.compiler.is_compiling() or optimizer.__dict__.get(_checked, False):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if refuse_partial_sums(parameters, type(optimizer).__name__, "this step"):
        optimizer.__dict__[_checked] = True


def refuse_partial_sums(parameters: Iterable[Tensor], reader: str, what: str) -> bool:
    """Whether parameters have gradients that are sums over several chunks; `reader` and `what` are for the error.

    Raises:
        RuntimeError: a gradient is of a rank's chunks alone.
    """
    found = False
    for number, p in enumerate(parameters):
        mark = chunks_of(p)
        if p.grad is None or mark is None or mark.of == 1:
            continue
        if not getattr(p.grad, "summed_over_chunks", False):
            raise RuntimeError(
                f"{reader} has the gradient of {label_of(p, number)} with shape {tuple(p.shape)} on "
                f"rank {mark.group.rank} of cp_group for a part of {mark.of} chunks of the sequence: call add() of "
                f"data_parallel.MicroBatchTree after each backward, and its reduce() before {what}"
            )
        found = True
    return found


register_optimizer_step_pre_hook(_refuse_partial_sums)


# --- a parameter's aliases --------------------------------------------------------------------------------------------


class _ChunkGradients:
    """A parameter's aliases, one for each chunk, and the gradients that they got since the last `take`."""

    def __init__(self) -> None:
        self.aliases: list[Tensor] = []
        self.waiting = PartialGradients()

    def __reduce__(self) -> tuple:  # a copy of the parameter has its own
        return _ChunkGradients, ()


torch.serialization.add_safe_globals([_ChunkGradients])


def take_chunk_gradients(parameter: Tensor) -> list[Tensor | None] | None:
    """The local gradient of each chunk since the last call, or since zero_grad(); None if there is none."""
    gradients: _ChunkGradients | None = getattr(parameter, "chunk_gradients", None)
    return None if gradients is None else gradients.waiting.take(parameter)


def _aliases(parameter: Tensor, chunks: int) -> list[Tensor]:
    """The parameter's aliases, with its attributes as they are now."""
    local = local_of(parameter)
    own = vars(parameter)
    if "chunk_gradients" not in own:
        own["chunk_gradients"] = _ChunkGradients()
    gradients: _ChunkGradients = own["chunk_gradients"]
    known = local_of(gradients.aliases[0]) if gradients.aliases else None
    if known is None or (known.data_ptr(), known.shape, known.dtype) != (local.data_ptr(), local.shape, local.dtype):
        gradients.aliases = [_alias(parameter, local, gradients.waiting, chunk, chunks) for chunk in range(chunks)]
    attributes = {name: value for name, value in own.items() if name != "chunk_gradients"}
    for chunk, alias in enumerate(gradients.aliases):
        vars(alias).update(attributes)
        if (of_experts := own.get("partial_gradients")) is not None:
            held = weakref.ref(parameter)
            alias.partial_gradients = PartialGradientsOfChunk(of_experts, held, chunk, chunks)  # type: ignore[attr-defined]
    return gradients.aliases


def _alias(parameter: Tensor, local: Tensor, waiting: PartialGradients, chunk: int, chunks: int) -> Tensor:
    alias: Tensor = nn.Parameter(local.detach())  # with the memory and the count of writes of `local`
    if is_dtensor(parameter):
        alias = grad_like(local.detach(), parameter).requires_grad_()
    alias.alias_of = id(parameter)  # type: ignore[attr-defined]  # for checks along the autograd graph
    held = weakref.ref(parameter)

    def take(alias: Tensor) -> None:
        grad, alias.grad = alias.grad, None
        parameter = held()
        if parameter is not None and grad is not None:
            sums: list[Tensor | None] = [None] * chunks
            sums[chunk] = local_of(grad)
            waiting.add(parameter, sums)

    alias.register_post_accumulate_grad_hook(take)
    return alias


# --- a model's forward ------------------------------------------------------------------------------------------------


class ChunkedSequence:
    """What the modules of a model know of its forward that runs: B and S, and into how many pieces S is cut.

    A forward with gradients is cut into the chunks of this rank, and so is what backward computes again of it
    (checkpointing). A forward without gradients is not cut, so that it takes any length.
    """

    def __init__(self, group: Group, chunks: int, dim: int, name: str) -> None:
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1 or chunks % group.size:
            raise ValueError(
                f"sequence_chunks={chunks!r} on rank {group.rank} of cp_group must be a positive multiple of the "
                f"context parallel degree {group.size}"
            )
        if dim not in (0, 1):
            raise ValueError(f"sequence_dim={dim!r} on rank {group.rank} of cp_group must be 0 or 1")
        self.group, self.chunks, self.dim, self.name = group, chunks, dim, name
        self.held = chunks // group.size
        self._forward: tuple[int, int | None, int] | None = None  # the pieces, B, S; None outside of a forward
        self._with_gradients: tuple[int, int | None, int] | None = None  # of the last one

    def enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A pre-hook of the model.

        Raises:
            ValueError: the model has no input with tokens, or not a number of tokens that the chunks divide.
        """
        names = ("input_ids", "inputs_embeds", "hidden_states")
        given = [*(kwargs.get(name) for name in names), *args, *kwargs.values()]
        x = next((x for x in given if isinstance(x, Tensor) and x.dim()), None)
        shape = () if x is None else x.shape[:-1] if x.is_floating_point() else x.shape
        if not len(shape) > self.dim:
            raise ValueError(
                f"{self.name} on rank {self.group.rank} of cp_group has no input whose dim {self.dim} (sequence_dim) "
                f"is the sequence: its first tensor is {'missing' if x is None else f'of shape {tuple(x.shape)}'}"
            )
        batch = shape[1 - self.dim] if len(shape) > 1 else None
        pieces = self.held if torch.is_grad_enabled() else 1
        if shape[self.dim] % pieces:
            raise ValueError(
                f"{self.name} on rank {self.group.rank} of cp_group has {shape[self.dim]} tokens of each sequence: "
                f"this rank's {pieces} of sequence_chunks={self.chunks} must divide them"
            )
        self._forward = pieces, batch, shape[self.dim]
        if torch.is_grad_enabled():
            self._with_gradients = self._forward

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._forward = None

    def of(self, where: Callable[[], str]) -> tuple[int, int | None, int]:
        """The pieces, B and S of the forward that runs, or is computed again."""
        found = self._forward
        if found is None and current_backward() != -1:
            found = self._with_gradients
        if found is None and not torch.is_grad_enabled():
            return 1, None, 0
        if found is None:
            raise RuntimeError(
                f"{where()} is called outside of a forward of {self.name}, which context_parallel_ was given: it does "
                "not know where a sequence of its input begins. Call that module, or give context_parallel_ one that "
                "holds all calls"
            )
        return found

    @property
    def pieces(self) -> int:
        return self.of(lambda: "a part of it")[0]


class ByChunk(KeepsAttributes):
    """What the classes of modules derive from that compute chunk by chunk, before the class that the module had."""

    _sequence: ChunkedSequence
    _name_in_model: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pieces = self._sequence.of(self._where)[0]
        return super().forward(*args, **kwargs) if pieces == 1 else self._by_chunk(*args, **kwargs)

    @outside_of_graphs("each chunk has parameters of its own, whose gradients a hook takes")
    def _by_chunk(self, *args: Any, **kwargs: Any) -> Any:
        pieces, batch, length = self._sequence.of(self._where)
        given, structure = tree.tree_flatten((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor) and x.dim()]
        # under sequence parallelism inputs or outputs are this rank's tokens of each chunk
        ranks: Any = self.group.size if getattr(self, "sequence_parallel", False) else 1
        whole, part = length // pieces, length // pieces // ranks
        takes_whole = isinstance(self, VocabParallelEmbedding) or getattr(self, "parallel_mode", None) == "row"
        cut = iter([self._cut(x, batch, whole if takes_whole else part, pieces) for x in tensors])
        columns = [next(cut) if isinstance(x, Tensor) and x.dim() else [x] * pieces for x in given]
        own, outputs = dict(self._parameters), []
        # what is no leaf is computed, as for torch.func.functional_call, and gets the sum over all chunks
        leaves = {n: p for n, p in own.items() if p is not None and p.requires_grad and p.is_leaf}
        aliases = {n: _aliases(p, pieces) for n, p in leaves.items()}
        try:
            for piece, values in enumerate(zip(*columns, strict=True)):
                self._parameters.update({name: of[piece] for name, of in aliases.items()})  # type: ignore[misc]
                args, kwargs = tree.tree_unflatten(list(values), structure)
                outputs.append(super().forward(*args, **kwargs))
        finally:
            self._parameters.update(own)
            for name, of in aliases.items():
                if "partition_stride" in vars(of[0]):  # which Linear sets on its bias, where the weight's was set late
                    own[name].partition_stride = of[0].partition_stride  # type: ignore[union-attr, attr-defined]
        results, (structure, *_) = zip(*map(tree.tree_flatten, outputs), strict=True)
        joined = [self._join(one, batch, (whole, part)) for one in zip(*results, strict=True)]
        return tree.tree_unflatten(joined, structure)

    def _place(self, shape: torch.Size, batch: int | None, lengths: tuple[int, ...]) -> tuple[int, int] | None:
        """(the dim with the tokens, 0; or with both if they are flattened, how many each sequence has)."""
        dim = self._sequence.dim if batch is not None else 0
        others = {batch, 1} if batch is not None else set()
        at = [dim] if getattr(self, "heads_dim", None) != dim else [dim + 1]  # of [B, heads, S, features]
        for tokens in at:
            if len(shape) > tokens and shape[tokens] in lengths and (not others or shape[1 - dim] in others):
                return tokens, 0
        if len(shape) == 1 and shape[0] in lengths:  # positions
            return 0, 0
        if batch is not None and len(shape) and shape[0] % batch == 0 and shape[0] // batch in lengths:
            return 0, shape[0] // batch
        return None

    def _cut(self, x: Tensor, batch: int | None, length: int, pieces: int) -> list[Tensor]:
        place = self._place(x.shape, batch, (length * pieces,))
        if place is None:
            raise ValueError(
                f"{self._where()} has an input of shape {tuple(x.shape)}, in which {length * pieces} tokens of each of "
                f"{batch or 1} sequences are not found: it must be [B, S, ..] (sequence_dim={self._sequence.dim}), or "
                "[B S, ..]. Modules with parameters compute token by token where sequence_chunks > 1"
            )
        dim, flat = place
        if flat and self._sequence.dim == 1:
            assert batch is not None
            return [piece.flatten(0, 1) for piece in x.unflatten(0, (batch, flat)).split(length, 1)]
        parts = x.split(length * (batch or 1) if flat else length, dim)
        if isinstance(self, ShardedModule) and not isinstance(self, PartsOfForeignModule):
            return list(parts)
        return [part.contiguous() for part in parts]  # another library's forward may take a view, as of a whole input

    def _join(self, outputs: tuple[Any, ...], batch: int | None, lengths: tuple[int, ...]) -> Any:
        if not isinstance(outputs[0], Tensor):
            return outputs[0]
        place = self._place(outputs[0].shape, batch, lengths)
        if place is None:
            raise ValueError(
                f"{self._where()} gives for {lengths[0]} tokens of each of {batch or 1} sequences a tensor of shape "
                f"{tuple(outputs[0].shape)}, in which they are not found: where sequence_chunks > 1 a module with "
                "parameters computes token by token"
            )
        dim, flat = place
        if flat and self._sequence.dim == 1:
            return torch.cat([one.unflatten(0, (batch, flat)) for one in outputs], 1).flatten(0, 1)
        return torch.cat(outputs, dim)

    def _where(self) -> str:
        return f"{self._name_in_model}, a {type(self).__name__}, on rank {self._sequence.group.rank} of cp_group"


# --- the change -------------------------------------------------------------------------------------------------------


def context_parallel_(
    module: nn.Module,
    cp_group: dist.ProcessGroup | DeviceMesh | Group | None,
    *,
    sequence_chunks: int,
    sequence_dim: int = 1,
) -> nn.Module:
    """Makes the gradients of `module` one partial sum for each of `sequence_chunks` chunks of the sequence.

        tpi.context_parallel_(model, mesh["cp"], sequence_chunks=4)
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=8)

    `parallelize(.., mesh=.., sequence_chunks=..)` does so by itself. For other models: call it on every rank, at every
    degree with the same number of chunks, and give attention its cp_group. Parameters stay the same objects; a module
    that has some gets a class derived from its own where a rank holds several chunks. A collective, which compares the
    ranks' parameters first. After backward the gradients are MicroBatchTree's to take, and `.grad` is not a sum over
    all tokens, or NaN, until its reduce().

    Modules with parameters must compute token by token, and be called in a forward of `module`, whose first tensor (or
    input_ids, inputs_embeds, hidden_states) is [B, S] of integers or [B, S, features]: this rank's tokens.

    Args:
        cp_group: a ProcessGroup or 1-D DeviceMesh; None is one rank.
        sequence_chunks: C, which the degree must divide, and which must divide the length of each sequence.
        sequence_dim: 1 for [B, S, ..], 0 for [S, B, ..] or [S, ..].

    Raises:
        ValueError: nothing was changed; names each parameter that cannot be had by chunk: of a module that has others
            inside (attention sinks excepted, whose gradient is whole), or combines tokens, or is parametrized; of
            layers by hand with sequence_parallel where a rank holds several chunks.
        RuntimeError: on every rank: different arguments or weights; nothing was changed.
    """
    group = resolve_group(cp_group, "cp_group", "cp")
    sequence = ChunkedSequence(group, sequence_chunks, sequence_dim, type(module).__name__)
    if problems := problems_by_chunk(module, group):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            f"{type(module).__name__} cannot have gradients for each of {sequence_chunks} chunks of the sequence on "
            f"rank {group.rank} of cp_group; nothing was changed:\n{lines}"
        )
    if sequence.held > 1:
        for name, child in module.named_modules():
            if getattr(child, "sequence_parallel", False) and child.group.size > 1:
                raise ValueError(
                    f"{name} on rank {group.rank} of cp_group has sequence_parallel=True, and a rank holds "
                    f"{sequence.held} chunks: its tokens would be parts of other chunks than before. Let "
                    f"sequence_chunks={group.size}, the degree, or use tpi.parallelize(.., sequence_parallel=True)"
                )
    facts = {"sequence_chunks": sequence_chunks, "sequence_dim": sequence_dim}
    check_same_model(module, group, facts, {n: local_of(p) for n, p in module.named_parameters()}, name="cp_group")
    cut_by_chunk(module, sequence)
    return module


def problems_by_chunk(model: nn.Module, group: Group, whole: Mapping[str, Container[str]] | None = None) -> list[str]:
    """Why parameters of `model` cannot have a gradient for each chunk, one line for each module.

    group: over which chunks are divided.
    whole: {name of a module: those of its parameters whose gradient will be complete}; None: as the modules say.
    """
    return list(_problems(model, group, whole or {}))


def _problems(model: nn.Module, group: Group, whole: Mapping[str, Container[str]]) -> Iterator[str]:
    for name, module in model.named_modules():
        where = f"{name or type(model).__name__}, a {type(module).__name__}"
        complete = whole.get(name, _whole_in(module))
        own = [key for key, p in module._parameters.items() if p is not None and key not in complete]
        if any(chunks_of(p) is not None for p in module.parameters(recurse=False)):
            yield f"{where}: has chunks of a sequence already"
        elif is_parametrized(module):
            yield f"{where}: is parametrized; it would have no gradient for each chunk"
        elif ranks := _experts_over(module, group):
            yield (
                f"{where}: its experts are divided over the ranks {ranks} of cp_group (expert_parallel_group): divide "
                'them over ranks of dp and tp at one place of cp, mesh["dp", "tp"]'
            )
        elif getattr(module, "fuse_wgrad_accumulation", False):
            yield f"{where}: fuse_wgrad_accumulation=True adds the gradients of all chunks"
        elif not own:
            continue
        elif has_own_forward(module):
            yield f"{where}: has a forward of its own, given to this module and not to its class"
        elif isinstance(module, _ACROSS_TOKENS):
            yield f"{where}: does not compute token by token"
        elif any(p is not None for child in module.children() for p in child.parameters()):
            yield (
                f"{where}: has {', '.join(own)} itself and modules with parameters inside; whether it computes token "
                "by token is unknown. Give these parameters a module of their own"
            )


def _experts_over(module: nn.Module, group: Group) -> list[int]:
    """The ranks of the group, if there are several, over which experts of this module are divided."""
    over = [carried_group(p) for p in module.parameters(recurse=False) if is_over_data(p)]
    common = {rank for experts in over if experts is not None for rank in ranks_of(experts)} & {*ranks_of(group)}
    return sorted(common) if len(common) > 1 else []


def _whole_in(module: nn.Module) -> tuple[str, ...]:
    """The parameters whose gradient is complete at once, as that of attention sinks after attention's exchange."""
    return module.SHARDED_PARAMETERS if isinstance(module, PartsOfForeignModule) else ()


def cut_by_chunk(model: nn.Module, sequence: ChunkedSequence) -> None:
    """`context_parallel_` after its checks."""
    for name, module in model.named_modules():
        whole = _whole_in(module)
        own = {key: p for key, p in module._parameters.items() if p is not None}
        for key, parameter in own.items():
            parameter.sequence_chunks = Chunks(sequence.group, sequence.chunks, key in whole)
        if sequence.held > 1 and not own.keys() <= set(whole):
            module.__class__ = derived_class(type(module), ByChunk)
            vars(module).update(_sequence=sequence, _name_in_model=name or type(model).__name__)
    if sequence.held > 1:
        with_key(model.register_forward_pre_hook(sequence.enter, with_kwargs=True), "chunks")
        with_key(model.register_forward_hook(sequence.leave, always_call=True), "chunks")
