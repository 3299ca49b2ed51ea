"""Cross-entropy of logits sharded along the vocabulary, with the same bits at every degree.

Legend: P ranks, T tokens, V ids in the vocabulary, n = (V + padding) / P columns on each rank.

    1. largest logit (and smallest, for label smoothing) and target's logit of each row: over local columns, gathered
    2. sum of exp(x - top), and of x - top: in fixed point over local columns, gathered, added as integers
    3. loss = log_sum - (x_target - top), with label smoothing and z-loss; summed over tokens in one order
    4. backward: elementwise from the local logits, top and log_sum, without communication

The results of a maximum and of a sum of integers do not depend on the order, so it does not matter where the vocabulary
is split. The communication is two or three fp32 and one or two int64 per token and rank; no rank ever holds [T, V].
Each step is one kernel (kernels/vocabulary/), and on one rank 1 and 2 and the losses of 3 are one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import NOT_LENT, Group, gather_major, resolve_group
from ..consistency.agreement import agreed_in, check_agreement, share_error
from ..consistency.shards import Part
from ..core.compiled import as_custom_op, op_config
from ..core.differentiation import once_differentiable
from ..core.dtensors import refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.layout import fresh_view
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.options import Reduction
from ..gemm.gemm_fn import BUNDLED_DTYPES
from ..kernels.select import select
from ..kernels.vocabulary.loss_spec import LossSpec
from . import stock
from .linear import flatten_tokens
from .regions import is_gathered
from .vocab import VocabShard, check_id_dtype, check_ids

REDUCTIONS = get_args(Reduction)
MAX_VOCABULARY = 1 << 21  # terms then keep 40 bits, and the error of V terms is below 2^-19; for V = 2^18, below 2^-25
_WHOLE_LOGITS = (
    "Pass tp_group=None for whole logits, as those of a model on its own plan are, or leave the head sharded: "
    "parallel_mode='column' without gather_output, 'colwise' in a plan"
)

op_config(LossSpec)


@op_config
@dataclass(frozen=True)
class CrossEntropyCall:
    """The arguments of one call besides its tensors."""

    shard: VocabShard
    spec: LossSpec
    reduction: Reduction


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """torch's cross_entropy over the last dim of logits that are sharded along it; the same bits at every degree.

    Args:
        logits: [.., n], this rank's columns of the vocabulary in rank order, all tokens, as a column-parallel Linear
            returns them; or [.., V], just as a Linear with gather_output returns them, which are taken for whole.
            bfloat16, float16 or float32; computed in fp32.
        target: [..], int64 or int32, ids of the whole vocabulary, the same on every rank.
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1.
        vocab_size: V, if n * P is larger: the columns from V on are padding, which has no effect and gets no gradient.
        label_smoothing: from 0 up to but not including 1, spread over all V ids.
        ignore_index: tokens with this target have loss 0 and gradient 0, whatever their logits (with the mode off as in
            torch, which gives NaN where those are not finite).
        reduction: "mean" over the tokens that are not ignored (NaN if there are none), "sum" or "none".
        z_loss: times the square of log(sum of exp(logits)), added to each token's loss (PaLM, arXiv 2204.02311).

    Returns:
        fp32, the same on every rank: 0-dim, or shaped as target for "none".

    Raises:
        ValueError: an option out of range, or shapes that are not compatible.
        TypeError: logits or target of another dtype.
        IndexError: an id out of range, on a CPU; on CUDA a device-side assertion fails instead, and a later call raises
            (see vocab.check_ids).
        RuntimeError: ranks that disagree, or whose logits are all the same (see consistency/shards.py).
    """
    with inside_a_layer():
        check_options(label_smoothing, reduction, z_loss)
        group = resolve_group(tp_group)
        group = Group(None, 0, 1) if is_gathered(logits, group) else group
        agreed = agreed_in(group)
        try:
            refuse_dtensor(logits, "logits")
            shard = _check_shapes(logits, target, vocab_size, group)
            invariant = is_tp_invariant_mode_enabled()
            if invariant and target.device.type == "cuda":
                check_id_dtype(target, name="target", rank=group.rank)  # the kernels assert the range
            else:
                check_ids(target, shard.size, name="target", rank=group.rank, ignored=ignore_index)
        except (IndexError, TypeError, ValueError) as error:
            share_error(error, group, logits.device, agreed)
            raise
        call = CrossEntropyCall(shard, LossSpec(shard.size, ignore_index, label_smoothing, z_loss), reduction)
        if group.size > 1:
            options = shard.size, label_smoothing, ignore_index, reduction, z_loss
            facts = {
                "the TP-invariant mode": invariant,
                "the options of vocab_parallel_cross_entropy": options,
                "the shape of logits": tuple(logits.shape),
                "the dtype of logits": str(logits.dtype),
                "whether logits need a gradient": torch.is_grad_enabled() and logits.requires_grad,
            }
            rows, allowed = logits.reshape(-1, logits.shape[-1]), getattr(logits, "shards_may_be_equal", False)
            part = Part("logits of vocab_parallel_cross_entropy", rows, (0, 1), _WHOLE_LOGITS)
            check_agreement(
                facts, group, logits.device, agreed, shards_may_be_equal=allowed, part=part, same={"target": target}
            )
        if not invariant:
            stock.log_once(group)
        return (_cross_entropy if invariant else _stock_cross_entropy)(logits, target, call)


def check_options(label_smoothing: float, reduction: str, z_loss: float) -> None:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing!r} is out of range: it must be from 0 to below 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown: choose one of 'mean', 'sum', 'none'")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss!r} is out of range: it must be 0 or more")


def _check_shapes(logits: Tensor, target: Tensor, vocab_size: int | None, group: Group) -> VocabShard:
    if logits.dtype not in BUNDLED_DTYPES:
        raise TypeError(
            f"logits is {logits.dtype} on rank {group.rank}: it must be one of {', '.join(map(str, BUNDLED_DTYPES))}"
        )
    if logits.dim() < 1 or logits.shape[-1] == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and target {tuple(target.shape)} on rank {group.rank}: they must "
            "be [.., n] with n at least 1, the vocabulary last, and [..]"
        )
    if target.device != logits.device:
        raise ValueError(
            f"target is on {target.device} on rank {group.rank}: move it to the logits' device, {logits.device}"
        )
    padded = logits.shape[-1] * group.size
    size = padded if vocab_size is None else vocab_size
    if not 1 <= size <= min(padded, MAX_VOCABULARY):
        raise ValueError(
            f"vocab_size={size} is out of range: for logits with {logits.shape[-1]} columns on each of {group.size} "
            f"ranks it must be from 1 to {min(padded, MAX_VOCABULARY)}"
        )
    return VocabShard(group, size, logits.shape[-1])


# --- the mode on ----------------------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    """logits [.., n], target [..] -> loss; see the top of this file.

    dlogits = g * (p * (1 + 2 z lse) - smoothing / V - [column is the target] * (1 - smoothing)),  p = exp(x - lse)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: CrossEntropyCall) -> Tensor:
        kernels = _kernels(logits)
        losses, stats = _token_losses(kernels, logits, target, call)
        ctx.call = call
        if call.reduction == "none":
            ctx.save_for_backward(logits, target, stats, None)
            return fresh_view(losses, target.shape)
        total, count = kernels.sum_of_tokens(losses, target, call.spec, mean=call.reduction == "mean")
        ctx.save_for_backward(logits, target, stats, count)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, target, stats, count = ctx.saved_tensors
        call: CrossEntropyCall = ctx.call
        first, columns = call.shard.first, call.shard.real
        dx = _kernels(logits).logits_grad(grad, logits, target, stats, count, columns, first, call.spec)
        return dx, None, None


def _kernels(logits: Tensor) -> ModuleType:
    return select("cross-entropy", logits.device.type)


def _token_losses(kernels: ModuleType, x: Tensor, ids: Tensor, call: CrossEntropyCall) -> tuple[Tensor, Tensor]:
    """(losses [T], stats [2, T]), both fp32, from x [.., n] and ids [..]; loss_spec.py says what stats are."""
    shard, spec = call.shard, call.spec
    if shard.group.size == 1:
        return kernels.whole_losses(x, ids, spec)
    extremes = gather_major(kernels.row_extremes(x, ids, shard.real, shard.first, spec), shard.group, peers=NOT_LENT)
    sums = gather_major(kernels.row_sums(x, ids, shard.real, extremes, spec), shard.group, peers=NOT_LENT)
    return kernels.token_losses(extremes, sums, ids, shard.width, spec)


def _outputs(logits: Tensor, target: Tensor, call: CrossEntropyCall) -> list[Tensor | None]:
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    loss = new(*(target.shape if call.reduction == "none" else ()))
    return [loss, new(2, target.numel()), new(dtype=torch.int64) if call.reduction == "mean" else None]


def _restore(ctx: Any, dtypes: Any, call: CrossEntropyCall) -> None:
    ctx.call = call


_cross_entropy = as_custom_op(
    _CrossEntropy,
    name="cross_entropy",
    tensors=("logits", "target"),
    outputs=_outputs,
    restore=_restore,
    saved=(0, 1, None, None),
)


# --- the mode off ---------------------------------------------------------------------------------------------------


def _stock_cross_entropy(logits: Tensor, target: Tensor, call: CrossEntropyCall) -> Tensor:
    """Maximum, sum of exponentials and the target's logit all-reduced, as Megatron-LM does (arXiv 1909.08053)."""
    shard, spec, smoothing = call.shard, call.spec, call.spec.label_smoothing
    group, ids = shard.group, target.reshape(-1).long()
    x = flatten_tokens(logits)[:, : shard.real].float()
    top = x.detach().amax(1) if shard.real else x.new_full((len(x),), -math.inf)
    top = stock.max_over_ranks(top, group)
    x = x - top.unsqueeze(1)
    here = (ids >= shard.first) & (ids < shard.first + shard.real)
    if shard.real:
        picked = x.gather(1, (ids - shard.first).clamp(0, shard.real - 1).unsqueeze(1)).squeeze(1)
        x_target = torch.where(here, picked, 0.0)
    else:
        x_target = x.sum(1)
    log_sum = stock.sum_over_ranks(x.exp().sum(1), group).log()
    losses = log_sum - stock.sum_over_ranks(x_target, group)
    if smoothing:
        mean = stock.sum_over_ranks(x.sum(1), group) / shard.size
        losses = (1.0 - smoothing) * losses + smoothing * (log_sum - mean)
    if spec.z_loss:
        losses = losses + spec.z_loss * (top + log_sum).square()
    valid = ids != spec.ignore_index
    losses = torch.where(valid, losses, 0.0)
    if call.reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / valid.sum() if call.reduction == "mean" else losses.sum()
