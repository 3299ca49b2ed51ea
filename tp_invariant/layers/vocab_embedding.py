"""VocabParallelEmbedding: an nn.Embedding whose table is sharded by rows.

Legend: P ranks, T tokens, D = embedding_dim, V = num_embeddings, n = (V + padding) / P rows of the table on each rank.

    forward    rows are moved and never added. For T/P of the tokens each rank receives, by an all-to-all, one row from
               every rank, and takes the row of the rank that owns the id. Without sequence parallelism the results are
               then gathered. This moves as many bytes as the reduce-scatter (and all-gather) of the stock path.
    backward   each rank sums the gradients of its own rows over all tokens; the order of a row's sum depends on that
               row's tokens alone (kernels/vocabulary/embedding.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.call_records import call_context
from ..comm.collectives import Group, exchange_rows, gather_dim, gather_uneven, resolve_group
from ..consistency.agreement import AgreedCalls, check_agreement, share_error
from ..core.compiled import as_custom_op, op_config
from ..core.differentiation import once_differentiable
from ..core.dtensors import as_local, local_of, refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.layout import check_sequence, fresh_view, split_sizes
from ..core.mode import is_tp_invariant_mode_enabled
from ..functional import stock
from ..functional.linear import flatten_tokens
from ..functional.vocab import VocabShard, check_ids
from ..gemm.gemm_fn import BUNDLED_DTYPES
from ..kernels.select import select
from .parameters import ShardedModule, ShardSpec, full_initialisation

if TYPE_CHECKING:
    from typing_extensions import Self


@op_config
@dataclass(frozen=True)
class EmbeddingCall:
    """The arguments of one call besides its tensors. `sequence_dim` is None unless the output's tokens are sharded."""

    shard: VocabShard
    sequence_dim: int | None
    padding_idx: int | None


class VocabParallelEmbedding(ShardedModule, nn.Embedding):
    """Looks up ids in a table whose rows are sharded over tensor-parallel ranks; the same bytes at every degree.

    ids [..], int64 or int32, the same on every rank -> [.., D]; under sequence_parallel this rank's tokens, with
    `sequence_dim` divided by P. The output has the table's bytes: -0.0 and NaN payloads are preserved. The table's
    gradient is summed in fp32 and rounded once; a row's sum runs over the tokens with its id, in token order.

    Args:
        num_embeddings: V, the number of ids. The degree must divide it after padding (pad_vocab_to_multiple_of).
        embedding_dim: D.
        padding_idx: its row starts as zero and gets no gradient, as in nn.Embedding.
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1.
        sequence_parallel, sequence_dim: whether, and along which dim of ids, the output's tokens are sharded.
        pad_vocab_to_multiple_of: the table gets additional rows up to a multiple of this number, so that the degrees
            divide it. These rows hold zeros, are never read, get a zero gradient, and are left out of full tensors
            (full_parameters). Use the same number at every degree: an output layer that shares the weight has
            padded_num_embeddings features.
        init_method: called with the full [V, D]; nn.Embedding's initialisation if None.
        device, dtype: as for nn.Embedding; "meta" works, followed by `to_empty()` and `reset_parameters()`.

    max_norm, scale_grad_by_freq and sparse are not supported.

    Raises:
        ValueError: the degree does not divide the padded vocabulary, or padding_idx is not in it.
    """

    SHARDED_PARAMETERS: tuple[str, ...] = ("weight",)
    scale_by: float | None = None  # what the rows are multiplied by, rounded to the weight's dtype (Gemma's)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        pad_vocab_to_multiple_of: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would make a full-size table
        if num_embeddings < 1:
            raise ValueError(f"num_embeddings={num_embeddings} must be at least 1")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx={padding_idx} is out of range: it must be from {-num_embeddings} to {num_embeddings - 1}"
            )
        multiple = pad_vocab_to_multiple_of
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"pad_vocab_to_multiple_of={multiple!r} is not a positive integer")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.group = resolve_group(tp_group)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.init_method = init_method
        self._agreed = AgreedCalls(self.group)
        self.padded_num_embeddings = -(-num_embeddings // multiple) * multiple
        if self.padded_num_embeddings % self.group.size:
            raise ValueError(
                f"num_embeddings={num_embeddings}, padded to {self.padded_num_embeddings}, is not divisible by TP "
                f"degree={self.group.size}: give pad_vocab_to_multiple_of a multiple of every degree you want, say "
                f"{math.lcm(128, self.group.size)}"
            )
        rows = self.padded_num_embeddings // self.group.size
        self.weight = nn.Parameter(torch.empty((rows, embedding_dim), device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, **options: Any
    ) -> VocabParallelEmbedding:
        """This rank's part of a full nn.Embedding: same values, padding_idx, dtype, device and requires_grad.

        Every rank must hold the same full `embedding`; options as for VocabParallelEmbedding. The weight is not tied to
        other modules that hold that of `embedding`.

        Raises:
            ValueError: `embedding` has max_norm, scale_grad_by_freq or sparse set, or is sharded already.
        """
        return cls._on_meta(embedding, tp_group=tp_group, **options)._with_parts_of(embedding)

    @classmethod
    def _on_meta(cls, embedding: nn.Embedding, **options: Any) -> Self:
        """What `from_embedding` makes of `embedding`, without values: on the meta device."""
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            value = getattr(embedding, name)
            if value != off:
                raise ValueError(f"embedding.{name}={value!r} is not supported: it must be {off!r}")
        weight = embedding.weight
        if tuple(weight.shape) != (embedding.num_embeddings, embedding.embedding_dim):
            raise ValueError(
                f"embedding.weight has shape {tuple(weight.shape)} where its sizes say "
                f"{(embedding.num_embeddings, embedding.embedding_dim)}: pass one that is not sharded yet"
            )
        sizes = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        return cls(*sizes, device="meta", dtype=weight.dtype, **options)

    def shard_spec(self, name: str) -> ShardSpec:
        if name != "weight":  # a user's own
            return ShardSpec(self.group, None, 1)
        return ShardSpec(self.group, 0, 1, self.padded_num_embeddings - self.num_embeddings)

    def reset_parameters(self) -> None:
        """Draws the full table as nn.Embedding does, or by init_method, and keeps this rank's rows.

        The values depend on the seed and not on the degree or the padding. Use the same seed on all ranks.
        """
        if self.weight.is_meta or self._reset_as_before():
            return
        shape = self.num_embeddings, self.embedding_dim
        with full_initialisation(self.weight, shape, self.shard_spec("weight")) as full, torch.no_grad():
            (self.init_method or nn.init.normal_)(full)
            if self.padding_idx is not None:
                full[self.padding_idx].zero_()

    def forward(self, input: Tensor) -> Tensor:
        """input, the class's ids [..] -> [.., D], this rank's tokens under sequence parallelism.

        Raises:
            IndexError: an id out of range, on a CPU; on CUDA a device-side assertion fails (see vocab.check_ids).
            TypeError: ids, or with the mode on a weight, of a dtype that is not supported.
            ValueError: a sequence_dim that ids do not have, or whose size the degree does not divide.
        """
        with inside_a_layer():
            y = self._forward(input)
        return y if self.scale_by is None else y * local_of(self.weight).new_tensor(self.scale_by)

    def _forward(self, ids: Tensor) -> Tensor:
        refuse_dtensor(ids, "ids of a VocabParallelEmbedding")
        group, weight = self.group, self.weight
        if not hasattr(weight, "tensor_model_parallel"):
            self._mark_replacement("weight", weight, self.shard_spec("weight"))
        sharded = self.sequence_parallel and group.size > 1
        try:
            invariant = is_tp_invariant_mode_enabled()
            self._check_input(ids, invariant)
        except (IndexError, TypeError, ValueError) as error:
            share_error(error, group, ids.device, self._agreed)
            raise
        call = EmbeddingCall(
            VocabShard(group, self.num_embeddings, local_of(weight).shape[0]),
            self.sequence_dim if sharded else None,
            self.padding_idx,
        )
        name = f"{type(self).__name__}({self.padded_num_embeddings}, {self.embedding_dim})"
        if group.size > 1:
            facts = {
                "the TP-invariant mode": invariant,
                "the layer": name,
                "padding_idx": self.padding_idx,
                "the sequence_dim that is sharded": call.sequence_dim,
                "the shape of ids": tuple(ids.shape),
                "the dtype of the weight": str(weight.dtype),
                "whether the weight needs a gradient": torch.is_grad_enabled() and weight.requires_grad,
            }
            own, allowed = self._parameters.get("weight"), self.shards_may_be_equal
            check_agreement(facts, group, ids.device, self._agreed, own, allowed, same={"ids": ids})
        if not invariant:
            stock.log_once(group)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            call_context.layer = self._agreed
        try:
            return _vocab_embedding(weight, ids, call) if invariant else _stock_embedding(as_local(weight), ids, call)
        finally:
            if not compiling:
                call_context.layer = None

    def _check_input(self, ids: Tensor, invariant: bool) -> None:
        rank, world = self.group.rank, self.group.size
        check_ids(ids, self.num_embeddings, name="ids", rank=rank)
        if self.sequence_parallel:
            if not 0 <= self.sequence_dim < ids.dim():
                raise ValueError(
                    f"sequence_dim={self.sequence_dim} is not a dim of ids with shape {tuple(ids.shape)} on rank "
                    f"{rank}: it must be from 0 to {ids.dim() - 1}"
                )
            if ids.shape[self.sequence_dim] % world:
                check_sequence(ids.shape, self.sequence_dim, world, f"ids on rank {rank}")
        if invariant and self.weight.dtype not in BUNDLED_DTYPES:
            raise TypeError(
                f"weight is {self.weight.dtype} on rank {rank}: with the mode on it must be one of "
                + ", ".join(map(str, BUNDLED_DTYPES))
            )

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, tp={self.group.rank}/{self.group.size}"
        return text + (", sequence_parallel=True" if self.sequence_parallel else "")


# --- the mode on ----------------------------------------------------------------------------------------------------


class _VocabEmbedding(torch.autograd.Function):
    """weight [n, D], ids [..] -> y [.., D], or y_seq_shard; dweight[v] = sum of dy_full over the tokens with id v."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, call: EmbeddingCall) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.call, ctx.dtype = call, weight.dtype
        group, dim = call.shard.group, call.sequence_dim
        if dim is not None:
            ids = ids.movedim(dim, 0)  # so that a rank's tokens are consecutive
        shape = [*ids.shape, weight.shape[1]]
        flat = ids.reshape(-1).long()
        rows = weight.index_select(0, call.shard.local(flat))  # an arbitrary row where another rank owns the id
        if group.size == 1:
            return fresh_view(rows, shape)
        sizes = split_sizes(len(flat), group.size)
        rows = exchange_rows(rows, sizes, group)  # [P, mine, D]
        start = sum(sizes[: group.rank])
        mine = call.shard.owner(flat[start : start + sizes[group.rank]])
        y = rows[mine, torch.arange(len(mine), device=mine.device)]
        if dim is None:
            return fresh_view(gather_uneven(y, 0, len(flat), group), shape)
        shape[0] //= group.size
        y = fresh_view(y, shape)
        return y.movedim(0, dim).contiguous() if dim else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        shard: VocabShard = ctx.call.shard
        if ctx.call.sequence_dim is not None:
            dy = gather_dim(dy, ctx.call.sequence_dim, shard.group)
        local = ids.reshape(-1).long() - shard.first
        mine = (local >= 0) & (local < shard.width)
        if ctx.call.padding_idx is not None:
            mine &= ids.reshape(-1) != ctx.call.padding_idx
        local = torch.where(mine, local, shard.width)  # out of range: the kernel ignores these
        kernels = select("embedding gradient", dy.device.type)
        return kernels.embedding_grad(flatten_tokens(dy), local, shard.width, ctx.dtype), None, None


def _outputs(weight: Tensor, ids: Tensor, call: EmbeddingCall) -> list[Tensor]:
    shape, dim = [*ids.shape, weight.shape[1]], call.sequence_dim
    if dim is not None:
        shape[dim] = shape[dim] // call.shard.group.size
    return [weight.new_empty(shape)]


def _restore(ctx: Any, dtypes: Any, call: EmbeddingCall) -> None:
    ctx.call, ctx.dtype = call, dtypes[0]


_vocab_embedding = as_custom_op(
    _VocabEmbedding,
    name="vocab_embedding",
    tensors=("weight", "ids"),
    outputs=_outputs,
    restore=_restore,
    saved=(1,),
)


# --- the mode off ---------------------------------------------------------------------------------------------------


def _stock_embedding(weight: Tensor, ids: Tensor, call: EmbeddingCall) -> Tensor:
    """Zeros for the rows of other ranks, and a sum over ranks, as in Megatron-LM (arXiv 1909.08053)."""
    shard = call.shard
    y = F.embedding(shard.local(ids), weight)
    if call.padding_idx is not None:
        y = torch.where((ids == call.padding_idx).unsqueeze(-1), y.detach(), y)
    if shard.group.size > 1:
        y = y.masked_fill((shard.owner(ids) != shard.group.rank).unsqueeze(-1), 0.0)
    return stock.sum_over_ranks(y, shard.group, call.sequence_dim)
