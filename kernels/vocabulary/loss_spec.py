"""What a cross-entropy computes, apart from its tensors: shared by cross_entropy.py (Triton) and its reference.

Legend: T tokens, P parts of the vocabulary, each of `width` columns and given in order. A part's first `columns`
columns are ids `first` and following; the rest is padding, which has no effect. Both modules have these functions:

    row_extremes(logits, target, columns, first, spec) -> extremes
    row_sums(logits, target, columns, extremes of all parts, spec) -> sums
    token_losses(extremes of all parts, sums of all parts, target, width, spec) -> losses, stats
    whole_losses(logits, target, spec) -> losses, stats             the three above, for P = 1
    sum_of_tokens(losses, target, spec, mean=..) -> total, count
    logits_grad(grad, logits, target, stats, count, columns, first, spec) -> dlogits
    row_entropies(logits, target, columns, stats, spec) -> entropies

        logits    [.., width]    bfloat16, float16 or float32, any strides; one part
        target    [..]           int64 or int32, any strides; ids of the whole vocabulary, or spec.ignore_index
        extremes  [E, T]         fp32: the part's largest logit, its logit at the target's column (of any column where
                                 the target is in another part), and with label smoothing its smallest logit
        sums      [S, T]         int64: sum of exp(x - top) * 2^exp_bits, and with label smoothing of (x - top) * scale
        losses    [T]            fp32; 0 where the target is ignored
        stats     [2, T]         fp32: top, the largest logit of the whole vocabulary, and log(sum of exp(x - top)).
                                 They mean nothing where the target is ignored
        total     []             fp32: the sum of losses, added in fp64; divided by count if `mean`
        entropies [T]            int64: sum of -p log p * 2^exp_bits over the part's columns, p = exp(x - top - log_sum)
        count     []             int64: the number of targets that are not ignored; None without `mean`
        grad      [..] or []     fp32: of the losses, or of their total
        dlogits   [.., width]    contiguous, in the logits' dtype; 0 in padding, and where the target is ignored

exp(x - top) is at most one, so a multiple of 2^-exp_bits stands for it in an int64, and sums of integers are exact: any
division of a row over parts, programs, threads or steps of a loop gives the same bits. (Kulisch's exact accumulator,
short because the terms are bounded.) x - top is multiplied by `scale`, a power of two for its row, likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


def fixed_point(terms: int) -> float:
    """What stands for 1: so small a power of two that the sum of as many terms of at most 1 stays below 2^62."""
    return 2.0 ** (62 - terms.bit_length())


@dataclass(frozen=True)
class LossSpec:
    """The options of vocab_parallel_cross_entropy that a token's loss depends on; vocabulary: its number of ids, V."""

    vocabulary: int
    ignore_index: int
    label_smoothing: float
    z_loss: float

    @property
    def exp_bits(self) -> int:
        """So few that V terms of at most 2^exp_bits stay below 2^62."""
        return int(math.log2(self.one))

    @property
    def one(self) -> float:
        """What stands for 1 in fixed point: 2^exp_bits."""
        return fixed_point(self.vocabulary)

    @property
    def extremes(self) -> int:
        """How many values of a row `row_extremes` has."""
        return 3 if self.label_smoothing else 2

    @property
    def sums(self) -> int:
        """How many values of a row `row_sums` has."""
        return 2 if self.label_smoothing else 1


def as_rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, width] and target [T]."""
    return logits.flatten(0, -2) if logits.dim() > 1 else logits.unsqueeze(0), target.reshape(-1)
