"""Log-probabilities of tokens and cross-entropy from hidden states and an output layer: one definition for all.

    log p(id) = (x[id] - top) - log_sum       top = largest x of the vocabulary (or of the token's support)
    log_sum   = log(sum of exp(x - top)), the sum in fixed point: exact, so in no order

in fp32, of x = the output layer's logits, scaled, capped and divided by the temperature as `Scores` says. These are the
bits of minus `vocab_parallel_cross_entropy`, and of torch's log_softmax inside of `tpi.batch_invariant()`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.collectives import Group
from ..consistency.agreement import agreed_in, check_agreement, share_error
from ..core.autocast import autocast_dtype
from ..core.dtensors import is_dtensor, local_of, refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.module_hooks import has_own_forward
from ..core.options import Reduction
from ..functional import stock
from ..functional.cross_entropy import MAX_VOCABULARY, CrossEntropyCall, check_options
from ..functional.linear import LinearCall
from ..functional.linear_cross_entropy import CHUNK, HeadCall, Scores, divided, head_losses
from ..functional.main_grad import MainGrad
from ..functional.regions import gather_sequence
from ..functional.vocab import VocabShard, check_id_dtype, check_ids
from ..gemm.gemm_fn import GemmFn, check_dtype
from ..gemm.slice_check import check_first_product
from ..kernels.select import select
from ..kernels.vocabulary.loss_spec import LossSpec
from ..layers.linear import Linear
from ..layers.parameters import carried_group, is_sharded

Head = Linear | nn.Linear | Tensor
_ONE_RANK = Group(None, 0, 1)


def token_log_probs(
    hidden: Tensor,
    lm_head: Head,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    support: Tensor | None = None,
    return_entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    fp32_logits: bool = False,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    chunk: int = CHUNK,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each token of `ids`, without ever holding the logits; the same bits at every degree.

    Differentiable in hidden and in the parameters of lm_head. The gradients have the bits of the product and
    `vocab_parallel_cross_entropy` called one after the other. With the mode off: all logits at once, by torch.

    Args:
        hidden: [.., H], what lm_head is called with; under its sequence_parallel this rank's tokens.
        lm_head: the output layer: a Linear (column-parallel, its gather_output is of no matter, or whole), an
            nn.Linear, or a weight [V, H].
        ids: [..], int64 or int32, all tokens: the id whose probability is wanted at each position, which for a causal
            model is the *next* token: token_log_probs(hidden[:, :-1], lm_head, input_ids[:, 1:]).
        temperature: the logits are divided by it, in fp32.
        support: [.., S], int64 or int32: the ids that a sampler could draw at each position (top-k, top-p), filled up
            with -1. The probability is then one among these, and that of any other id is 0 (log: -inf). A position
            with -1 alone has the whole vocabulary.
        return_entropy: also return the entropy of each position's distribution.
        logit_scale, softcap: logits * logit_scale, and softcap * tanh(that / softcap), in the logits' dtype, as models
            of transformers compute them (Granite: 1 / logits_scaling; Gemma 2: final_logit_softcapping).
        fp32_logits: keep the logits in fp32, in which they are accumulated, and do not round them to hidden's dtype.
        ignore_index: positions with this id have log-probability, entropy and gradient 0.
        vocab_size: V, if lm_head has more rows, which are padding.
        chunk: logits that a rank holds at a time; memory and speed alone depend on it.

    Returns:
        fp32 [..], or a pair of it and the entropies [..], the same on every rank.

    Raises:
        TypeError: an lm_head that is not one of these, or a dtype that is not supported.
        ValueError: a shape, an option out of range, an lm_head whose forward would do more than the product.
        IndexError: an id out of range, on a CPU; on CUDA a device-side assertion fails.
        RuntimeError: ranks that disagree.
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} is out of range: it must be above 0")
    scores = Scores(fp32_logits, float(logit_scale), _cap(softcap), float(temperature))
    spec = (ignore_index, 0.0, 0.0)
    values = _losses(hidden, lm_head, ids, support, scores, spec, "none", return_entropy, vocab_size, chunk)
    log_probs = (0.0 - values[0]).view(ids.shape)
    return (log_probs, values[1].view(ids.shape)) if return_entropy else log_probs


def linear_cross_entropy(
    hidden: Tensor,
    lm_head: Head,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    fp32_logits: bool = False,
    vocab_size: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """`vocab_parallel_cross_entropy` of an output layer, without ever holding its logits; the bits of the two apart.

    Args:
        hidden, lm_head, logit_scale, softcap, fp32_logits, vocab_size, chunk: as for `token_log_probs`.
        target: [..], int64 or int32, all tokens.
        label_smoothing, ignore_index, reduction, z_loss: as for `vocab_parallel_cross_entropy`.

    Returns:
        fp32, the same on every rank: 0-dim, or shaped as target for "none".

    Raises:
        As `token_log_probs`.
    """
    check_options(label_smoothing, reduction, z_loss)
    scores = Scores(fp32_logits, float(logit_scale), _cap(softcap), 1.0)
    spec = (ignore_index, label_smoothing, z_loss)
    loss = _losses(hidden, lm_head, target, None, scores, spec, reduction, False, vocab_size, chunk)
    return loss[0].view(target.shape) if reduction == "none" else loss


def log_softmax(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log-probabilities of whole logits [.., V] -> fp32 [.., V], with the bits of `token_log_probs`; no gradient.

    Args:
        logits: bfloat16, float16 or float32; of a sampler's step, say, whole on every rank.
        temperature: the logits are divided by it, in fp32.

    Raises:
        ValueError: a temperature that is not above 0, or logits without a vocabulary.
    """
    if not 0.0 < temperature < math.inf or logits.dim() < 1 or not logits.shape[-1]:
        raise ValueError(
            f"temperature={temperature!r} and logits of shape {tuple(logits.shape)}: the first must be above 0, the "
            "second [.., V]"
        )
    with torch.no_grad(), inside_a_layer():
        x = logits.detach().reshape(-1, logits.shape[-1])
        x = x if temperature == 1.0 else divided(x, temperature)
        y: Tensor = select("softmax", x.device.type).softmax(x, log=True, out_dtype=torch.float32)
        return y.view(logits.shape)


def _cap(softcap: float | None) -> float | None:
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap!r} is out of range: it must be above 0, or None")
    return None if softcap is None else float(softcap)


class _Product(NamedTuple):
    """What an output layer multiplies by, and how."""

    weight: Tensor
    bias: Tensor | None
    call: LinearCall
    tokens_sharded: Group | None  # hidden is this rank's part along sequence_dim
    sequence_dim: int


def _product_of(head: Head) -> _Product:
    """Raises: TypeError, ValueError: a head that is not one, or that does more than the product."""
    if isinstance(head, Tensor):
        group = carried_group(head) if is_sharded(head) else None
        return _product(head, None, group or _ONE_RANK, None, "auto")
    if not isinstance(head, nn.Linear) or (isinstance(head, Linear) and head._norm_call() is not None):
        raise TypeError(
            f"lm_head is a {type(head).__name__}: it must be a Linear, an nn.Linear or a weight [V, H]. Of an output "
            "layer with an adapter, call the layer and vocab_parallel_cross_entropy"
        )
    hooks = head._forward_hooks or head._forward_pre_hooks
    if hooks or has_own_forward(head):
        raise ValueError(
            "lm_head has forward hooks, or a forward of its own, which would not run: do in the call what they do "
            "(fp32_logits, say), and pass lm_head.weight. A module that fully_shard has sharded is whole inside of its "
            "own forward alone"
        )
    if not isinstance(head, Linear):
        return _product(head.weight, head.bias, _ONE_RANK, None, "auto")
    if head.parallel_mode == "row" or head.partition_stride != 1 or head.partition_sizes is not None:
        raise ValueError(
            f"lm_head is {head._name} with partition_stride={head.partition_stride} on rank {head.group.rank}: it must "
            "be column-parallel, so that each rank has consecutive ids, or whole (parallel_mode=None)"
        )
    group = head.group if head.parallel_mode == "column" else _ONE_RANK
    main_grad = head._main_grad() if head.fuse_wgrad_accumulation else None
    product = _product(head.weight, head.bias, group, head.gemm_fn, head.owner_map, main_grad)
    sharded = head.group if head.sequence_parallel and head.group.size > 1 else None
    return product._replace(tokens_sharded=sharded, sequence_dim=head.sequence_dim)


def _product(
    weight: Tensor, bias: Tensor | None, group: Group, gemm_fn: GemmFn | None, owner_map: str,
    main_grad: MainGrad | None = None,
) -> _Product:  # fmt: skip
    call = LinearCall(group, False, 0, 1, owner_map, gemm_fn, main_grad=main_grad)
    return _Product(weight, bias, call, None, 0)


def _losses(
    hidden: Tensor, head: Head, target: Tensor, support: Tensor | None, scores: Scores,
    options: tuple[int, float, float], reduction: Reduction, entropy: bool, vocab_size: int | None, chunk: int,
) -> Tensor:  # fmt: skip
    ignore_index, label_smoothing, z_loss = options
    with inside_a_layer():
        product = _product_of(head)
        if product.tokens_sharded is not None:
            hidden = gather_sequence(hidden, product.tokens_sharded, product.sequence_dim)
        weight, bias, group = product.weight, product.bias, product.call.group
        dtype = autocast_dtype(hidden.device)
        if dtype is not None:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        agreed, invariant = agreed_in(group), is_tp_invariant_mode_enabled()
        try:
            _check_whole(weight, group)
            shard = _check(hidden, local_of(weight), target, support, vocab_size, group, chunk)
            if invariant:
                check_dtype(product.call.gemm_fn, hidden, f"hidden on rank {group.rank}")
                if isinstance(head, Linear):
                    sizes = hidden.numel() // max(hidden.shape[-1], 1), head.in_features, head.out_features
                    check_first_product(
                        head.gemm_fn, head._agreed, hidden, sizes, weight.dtype, group, head._name,
                        biased=bias is not None,
                    )  # fmt: skip
            if invariant and target.device.type == "cuda":
                check_id_dtype(target, name="ids", rank=group.rank)  # the kernels assert the range
            else:
                check_ids(target, shard.size, name="ids", rank=group.rank, ignored=ignore_index)
            if support is not None:
                check_ids(support, shard.size, name="support", rank=group.rank, ignored=-1)
        except (IndexError, TypeError, ValueError) as error:
            share_error(error, group, hidden.device, agreed)
            raise
        spec = LossSpec(shard.size, ignore_index, label_smoothing, z_loss)
        call = HeadCall(product.call, CrossEntropyCall(shard, spec, reduction), scores, entropy, chunk)
        if group.size > 1:
            facts = {
                "the TP-invariant mode": invariant,
                "the options of token_log_probs": (spec, scores, reduction, entropy, chunk, support is not None),
                "the shape of hidden": tuple(hidden.shape),
                "the dtype of hidden": str(hidden.dtype),
                "whether hidden needs a gradient": torch.is_grad_enabled() and hidden.requires_grad,
            }
            same = {"ids": target} if support is None else {"ids": target, "support": support}
            check_agreement(facts, group, hidden.device, agreed, same=same)
        if not invariant:
            stock.log_once(group)
        ids = target.reshape(-1)
        kept = None if support is None else support.reshape(ids.shape[0], -1)
        rows = hidden.reshape(ids.shape[0], hidden.shape[-1])
        return head_losses(rows, weight, bias, ids, kept, call, invariant)


def _check_whole(weight: Tensor, group: Group) -> None:
    """Raises: ValueError: a DTensor that is sharded over other ranks than those of tp_group."""
    if is_dtensor(weight) and local_of(weight).shape[0] * group.size != weight.shape[0]:
        raise ValueError(
            f"the weight of lm_head is a DTensor placed as {weight.placements} on rank {group.rank}, of which "
            f"{local_of(weight).shape[0]} of {weight.shape[0]} rows are here and tp_group has {group.size} ranks: "
            "after fully_shard call this inside of the forward of the module that was given to it, or unshard() it"
        )


def _check(
    hidden: Tensor, weight: Tensor, ids: Tensor, support: Tensor | None, vocab_size: int | None, group: Group,
    chunk: int,
) -> VocabShard:  # fmt: skip
    """Raises: TypeError, ValueError: tensors that do not fit each other."""
    refuse_dtensor(hidden, "hidden")
    where = f"on rank {group.rank}"
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and the weight of lm_head {tuple(weight.shape)} {where}: they "
            "must be [.., H] and [V, H], or this rank's rows of it"
        )
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden is {hidden.dtype} and the weight of lm_head {weight.dtype} {where}: convert one of them, or use "
            "torch.autocast"
        )
    if ids.shape != hidden.shape[:-1]:
        raise ValueError(
            f"ids has shape {tuple(ids.shape)} and hidden {tuple(hidden.shape)} {where}, all tokens: they must be [..] "
            "and [.., H]"
        )
    if support is not None and (support.shape[:-1] != ids.shape or support.dtype not in (torch.int64, torch.int32)):
        raise ValueError(
            f"support is {support.dtype} of shape {tuple(support.shape)} {where}: it must be int64 or int32 of shape "
            f"{(*ids.shape, 'S')}"
        )
    for name, other in (("ids", ids), ("support", support), ("the weight of lm_head", weight)):
        if other is not None and other.device != hidden.device:
            raise ValueError(f"{name} is on {other.device} {where}: move it to the device of hidden, {hidden.device}")
    padded = weight.shape[0] * group.size
    size = padded if vocab_size is None else vocab_size
    if not 1 <= size <= min(padded, MAX_VOCABULARY):
        raise ValueError(
            f"vocab_size={size} is out of range {where}: for {weight.shape[0]} rows of the weight on each of "
            f"{group.size} ranks it must be from 1 to {min(padded, MAX_VOCABULARY)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is out of range: it must be at least 1")
    return VocabShard(group, size, weight.shape[0])
