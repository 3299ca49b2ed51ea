"""Cross-entropy, and entropy, of an output layer whose logits are never held at once: bits of the two calls apart.

Legend: P ranks, T tokens, V ids in the vocabulary, H features, n = (V + padding) / P rows of the weight on each rank.

    rows    [T, H]   whole              weight  [n, H]          target   [T]
    logits  = rows weightᵀ + bias       scores  = fp32(softcap(logits * scale)) / temperature      losses as in
              [T, n], in chunks                                                                    cross_entropy.py
    drows   = dlogits W, summed over V, which is sharded        dweight = dlogitsᵀ rows, summed over T

Forward computes the logits of some tokens at a time. Backward computes them again: of some tokens and all columns for
drows, and, unless that was all of them, of all tokens and some columns for dweight, since a sum over tokens that is cut
would have other bits. So both gradients have the bits of one product each, and the memory is that of a chunk. Which
tokens and columns are in a chunk changes no bit, because the products are slice-invariant and all else is elementwise.

The entropy is sum of -p log p, in fixed point as the sums of cross_entropy.py. Its derivative is -p (log p + entropy).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import NOT_LENT, gather_major, gather_uneven, start_exchange_rows
from ..core.compiled import as_custom_op, op_config
from ..core.differentiation import once_differentiable
from ..core.dtensors import as_local
from ..core.layout import split_sizes
from ..gemm.gemm_fn import RankMajor, column_sums, gemm, gemm_into, gemm_rank_major
from ..gemm.owner_maps import ShardedWeight
from ..kernels.elementwise import in_whole_vectors
from ..kernels.select import select
from . import stock
from .cross_entropy import CrossEntropyCall, _kernels, _stock_cross_entropy, _token_losses
from .linear import LinearCall, without_custom_op
from .main_grad import is_asked_for

CHUNK = 1 << 27  # logits of a rank at a time: 256 MiB of bfloat16


def divided(logits: Tensor, temperature: float) -> Tensor:
    """In fp32, by a tensor: by a number of Python's torch multiplies by the inverse on CUDA, which rounds twice."""
    return logits.float() / logits.new_full((), temperature, dtype=torch.float32)


@op_config
@dataclass(frozen=True)
class Scores:
    """What becomes of logits before log-softmax, as models of transformers do it: each step in the logits' dtype.

    fp32: the logits are not rounded to the weight's dtype. scale: a factor; softcap: softcap * tanh(x / softcap), or
    None; temperature: divides in fp32, as samplers do.
    """

    fp32: bool
    scale: float
    softcap: float | None
    temperature: float

    @property
    def are_logits(self) -> bool:
        return self.scale == 1.0 and self.softcap is None and self.temperature == 1.0

    def of(self, logits: Tensor) -> Tensor:
        """Scores from logits of any shape, differentiable."""
        x = logits if self.scale == 1.0 else logits * self.scale
        if self.softcap is not None:
            x = in_whole_vectors(torch.tanh, x / self.softcap) * self.softcap
        return x if self.temperature == 1.0 else divided(x, self.temperature)


@op_config
@dataclass(frozen=True)
class HeadCall:
    """The arguments of one call besides its tensors. chunk: how many logits a rank computes at a time."""

    linear: LinearCall
    loss: CrossEntropyCall
    scores: Scores
    entropy: bool
    chunk: int


def _slices(size: int, step: int) -> Iterator[slice]:
    """At least one, so that of nothing the gradients are products of nothing."""
    step = step // 128 * 128 or max(step, 1)
    for start in range(0, max(size, 1), step):
        yield slice(start, min(start + step, size))


def is_kept(support: Tensor, first: int, width: int) -> Tensor:
    """bool [R, width]: which of the columns from `first` on are in each row's support [R, S]; all for [-1, ..]."""
    local = support.long() - first
    local = torch.where((local >= 0) & (local < width), local, width)
    kept = torch.zeros((support.shape[0], width + 1), dtype=torch.bool, device=support.device)
    kept.scatter_(1, local, True)
    return kept[:, :width] | (support < 0).all(1, keepdim=True)


class _Piece:
    """The logits of some tokens and some columns of this rank's."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, support: Tensor | None, call: HeadCall,
        columns: slice = slice(None),
    ) -> None:  # fmt: skip
        weight, bias = weight[columns], None if bias is None else bias[columns]
        shard = call.loss.shard
        first = columns.start or 0
        self.call, self.first, self.real = call, shard.first + first, min(max(shard.real - first, 0), len(weight))
        dtype = torch.float32 if call.scores.fp32 else None
        self.logits = gemm(call.linear.gemm_fn, rows, weight.t(), bias=bias, out_dtype=dtype)
        self.kept = None if support is None else is_kept(support, self.first, len(weight))
        self.scores = self._masked(call.scores.of(self.logits))

    def _masked(self, x: Tensor) -> Tensor:
        return x if self.kept is None else x.masked_fill(~self.kept, float("-inf"))

    def gradient(
        self, grad: Tensor, target: Tensor, stats: Tensor, count: Tensor | None, entropy: Tensor | None, dtype: Any
    ) -> Tensor:
        """dlogits. grad: [] of the total, or [1, t] of the losses, or [2, t] of the losses and entropies."""
        spec = self.call.loss.spec
        of_loss = grad[0].contiguous() if grad.dim() else grad
        kernels = _kernels(self.scores)
        scores = self.scores if entropy is None else self.scores.float()
        dx = kernels.logits_grad(of_loss, scores, target, stats, count, self.real, self.first, spec)
        if entropy is not None:
            counts = (target != spec.ignore_index).unsqueeze(1)
            dx[:, : self.real] += self._entropy_gradient(grad[1], stats, entropy).masked_fill(~counts, 0.0)
        if self.kept is not None:
            dx.masked_fill_(~self.kept, 0.0)
        if not self.call.scores.are_logits:
            with torch.enable_grad():
                logits = self.logits.detach().requires_grad_()
                scores = self.call.scores.of(logits)
            (dx,) = torch.autograd.grad(scores, logits, dx.to(scores.dtype))
        return dx.to(dtype)

    def _entropy_gradient(self, grad: Tensor, stats: Tensor, entropy: Tensor) -> Tensor:
        x = self.scores[:, : self.real].float()
        log_p = ((x - stats[0].unsqueeze(1)) - stats[1].unsqueeze(1)).clamp_(min=-100.0)  # p is 0 there
        return in_whole_vectors(torch.exp, log_p) * (log_p + entropy.unsqueeze(1)) * -grad.unsqueeze(1)


def _entropies(piece: _Piece, target: Tensor, stats: Tensor, call: HeadCall) -> Tensor:
    """fp32 [t]: of all columns, from this rank's."""
    shard, spec = call.loss.shard, call.loss.spec
    sums = _kernels(piece.scores).row_entropies(piece.scores, target, shard.real, stats, spec)
    if shard.group.size > 1:
        sums = gather_major(sums, shard.group, peers=NOT_LENT).sum(0)
    whole = (sums.double() / spec.one).float()
    return torch.where((target == spec.ignore_index) | stats[1].isfinite(), whole, float("nan"))


class _Head(torch.autograd.Function):
    """rows, weight, bias, target, support [T, S] or None -> losses and entropies [1 or 2, T], or their total []."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, support: Tensor | None,
        call: HeadCall,
    ) -> Tensor:  # fmt: skip
        tokens = rows.shape[0]
        values = rows.new_empty((2 if call.entropy else 1, tokens), dtype=torch.float32)
        stats = rows.new_empty((2, tokens), dtype=torch.float32)
        kernels = select("cross-entropy", rows.device.type)
        for part in _slices(tokens, call.chunk // max(len(weight), 1)):
            piece = _Piece(rows[part], weight, bias, None if support is None else support[part], call)
            values[0, part], stats[:, part] = _token_losses(kernels, piece.scores, target[part], call.loss)
            if call.entropy:
                values[1, part] = _entropies(piece, target[part], stats[:, part].contiguous(), call)
            del piece
        total, count = values, None
        if call.loss.reduction != "none":
            mean = call.loss.reduction == "mean"
            total, count = kernels.sum_of_tokens(values[0], target, call.loss.spec, mean=mean)
        entropies = values[1].clone() if call.entropy else None
        ctx.save_for_backward(rows, weight, bias, target, support, stats, entropies, count)
        _restore(ctx, (), call)
        ctx.weight = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, target, support, stats, entropy, count = ctx.saved_tensors
        call: HeadCall = ctx.call
        need_x, need_w, need_b, *_ = ctx.needs_input_grad
        if call.linear.main_grad is not None:
            need_w = is_asked_for(ctx, 1)
        tokens, fn = rows.shape[0], call.linear.gemm_fn

        def gradient(part: slice, columns: slice = slice(None)) -> Tensor:
            piece = _Piece(rows[part], weight, bias, None if support is None else support[part], call, columns)
            of_part = grad[:, part] if grad.dim() else grad
            found = None if entropy is None else entropy[part]
            return piece.gradient(of_part, target[part], stats[:, part].contiguous(), count, found, weight.dtype)

        by_tokens = list(_slices(tokens, call.chunk // max(len(weight), 1)))
        at_once = len(by_tokens) == 1
        dx, dlogits = torch.empty_like(rows) if need_x else None, None
        if at_once and not need_x:
            dlogits = gradient(by_tokens[0])
        elif dx is not None:
            product = _SumOverVocabulary(ctx.weight if ctx.weight is not None else weight, call.linear)
            for part in by_tokens:
                dlogits = gradient(part)
                dx[part] = product(dlogits)
            product.release()
        if not at_once:
            dlogits = None
        dw = torch.empty_like(weight) if need_w and call.linear.main_grad is None else None
        db = torch.empty_like(bias) if need_b and bias is not None else None
        if need_w or need_b:
            for columns in [slice(0, len(weight))] if at_once else _slices(len(weight), call.chunk // max(tokens, 1)):
                d = gradient(slice(None), columns) if dlogits is None else dlogits
                if dw is not None:
                    dw[columns] = gemm(fn, d.t(), rows, out_dtype=weight.dtype)
                elif need_w and (main_grad := call.linear.main_grad) is not None:
                    gemm_into(fn, d.t(), rows, main_grad.buffer()[columns], accumulate=main_grad.accumulate)
                if db is not None:
                    db[columns] = column_sums(fn, d, out_dtype=db.dtype)
                del d
        if need_w and call.linear.main_grad is not None:
            dw = call.linear.main_grad.done(weight)
        return dx, dw, db, None, None, None


class _SumOverVocabulary:
    """dlogits [t, n] -> drows [t, H] by the owner map `rows`, with the weight gathered once for all chunks."""

    def __init__(self, weight: Tensor, linear: LinearCall) -> None:
        self.linear = linear
        self.weight = ShardedWeight(weight, 0, linear.stride, linear.group, linear.grad)
        self.gathered = self.weight.start("rows") if linear.group.size > 1 else None
        self.whole = None if self.gathered is None else self.weight.wait(self.gathered, "rows")

    def __call__(self, dlogits: Tensor) -> Tensor:
        fn, group = self.linear.gemm_fn, self.linear.group
        if self.whole is None:
            return gemm(fn, dlogits, self.weight.local)
        sizes = split_sizes(len(dlogits), group.size)
        mine = start_exchange_rows(dlogits, sizes, group, peers=NOT_LENT)
        part = gemm_rank_major(fn, RankMajor(mine.wait(), 1, self.linear.stride), self.whole)
        mine.release()
        return gather_uneven(part, 0, len(dlogits), group, peers=NOT_LENT)

    def release(self) -> None:
        if self.gathered is not None:
            self.gathered.release()


def _restore(ctx: Any, dtypes: Any, call: HeadCall) -> None:
    ctx.call, ctx.weight = call, None


def _outputs(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, support: Tensor | None, call: HeadCall
) -> list[Tensor | None]:
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return rows.new_empty(shape, dtype=dtype)

    tokens, reduction = rows.shape[0], call.loss.reduction
    result = new(2 if call.entropy else 1, tokens) if reduction == "none" else new()
    count = new(dtype=torch.int64) if reduction == "mean" else None
    return [result, new(2, tokens), new(tokens) if call.entropy else None, count]


_head = as_custom_op(
    _Head,
    name="linear_cross_entropy",
    tensors=("rows", "weight", "bias?", "target", "support?"),
    outputs=_outputs,
    restore=_restore,
    saved=(0, 1, 2, 3, 4, None, None, None),
)
_head_into_main_grad = without_custom_op(_Head)


def head_losses(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, support: Tensor | None, call: HeadCall,
    invariant: bool,
) -> Tensor:  # fmt: skip
    """losses and entropies [1 or 2, T], fp32, or with a reduction the total [], as this file's first lines say."""
    if not invariant:
        return _stock_losses(rows, as_local(weight), as_local(bias), target, support, call)
    head = _head if call.linear.main_grad is None else _head_into_main_grad
    return cast(Tensor, head(rows, weight, bias, target, support, call))


def _stock_losses(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, support: Tensor | None, call: HeadCall
) -> Tensor:
    """The mode off: all logits at once, torch's product, and sums over ranks by all-reduce."""
    shard = call.loss.shard
    x = stock.column_linear(rows, weight, bias, call.linear)
    x = call.scores.of(x.float() if call.scores.fp32 else x)
    if support is not None:
        x = x.masked_fill(~is_kept(support, shard.first, len(weight)), float("-inf"))
    losses = _stock_cross_entropy(x, target, call.loss)
    if call.loss.reduction != "none":
        return losses
    values = [losses]
    if call.entropy:
        x = F.pad(x[:, : shard.real].float(), (0, max(1 - shard.real, 0)), value=float("-inf"))
        shifted = x - stock.max_over_ranks(x.detach().amax(1), shard.group).unsqueeze(1)
        exps = shifted.exp()
        total = stock.sum_over_ranks(exps.sum(1), shard.group)
        products = (exps * shifted.masked_fill(shifted == float("-inf"), 0.0)).sum(1)
        entropies = total.log() - stock.sum_over_ranks(products, shard.group) / total
        values.append(entropies.masked_fill(target == call.loss.spec.ignore_index, 0.0))
    return torch.stack(values)
