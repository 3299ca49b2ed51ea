"""The invariant layers as autograd functions: forward, dgrad, wgrad and bias gradient, one formula each.

Legend (P ranks, this one is r; S pieces of partition_stride; `..` are token dims, T tokens in all):
    x_full [.., K]      x_seq_shard [.., K] with sequence_dim divided by P      x_shard_k [.., K/P]
    w_shard_n [N/P, K]  w_shard_k [N, K/P]
Sums over tokens (wgrad, bias gradient) walk the tokens in the order of the full activation, so sequence-parallel
operands are gathered along sequence_dim first. Products over a sharded K go to gemm/owner_maps.py, where the order of
the rows is free: there the sequence comes first, so that a rank's rows are consecutive.

Communication is started ahead of its use, in the same order on every rank:
    column backward   x's tokens, then dy's rows to their owners; wgrad runs while dy travels, dgrad comes last
    row backward      dy's tokens; then those of the x of the column-parallel layer that was called before it, whose
                      backward is next: they travel beside this layer's dgrad and wgrad
    weights           one use ahead; gemm/weights.py knows the order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import moves
from ..comm.collectives import Group, Pending, gather_dim, start_gather_dim
from ..core.compiled import as_custom_op, op_config
from ..core.differentiation import once_differentiable
from ..core.layout import Stride, fresh_view, reshape_in_place
from ..gemm.gemm_fn import (
    GemmFn,
    column_sums,
    gemm,
    gemm_into,
    ones_that_stay,
    remember_products,
    repeat_products,
    uses_bundled,
)
from ..gemm.owner_maps import ShardedWeight, start_product
from ..gemm.tokens import shared_tokens
from ..gemm.weights import weight_cache
from .main_grad import MainGrad, is_asked_for
from .regions import among_unread_parts, dim_gathered, dim_of_part_read, gather_of


@op_config
@dataclass(frozen=True)
class LinearCall:
    """The arguments of one call of a linear layer besides its tensors. Frozen: backward uses the values of forward."""

    group: Group
    sequence_parallel: bool
    sequence_dim: int
    stride: Stride
    owner_map: str
    gemm_fn: GemmFn | None
    grad: bool = field(default_factory=torch.is_grad_enabled)  # inside an autograd function grad mode is always off
    main_grad: MainGrad | None = None  # dw is added there instead of being returned

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens in TP=1's order, from this rank's tokens if they are sharded."""
        return gather_dim(x, self.sequence_dim, self.group) if self.sequence_parallel else x

    def start_gather_tokens(self, x: Tensor, user: Tensor | None = None) -> Pending:
        """Starts `gather_tokens`. With `user`, the calling layer's weight, layers with the same x share one gather."""
        if not self.sequence_parallel:
            return Pending(x, None)
        if user is None:
            return start_gather_dim(x, self.sequence_dim, self.group)
        return shared_tokens.take(x, self.sequence_dim, self.group, user)

    def start_product(
        self, a: Tensor, weight: Tensor, k_dim: int, bias: Tensor | None = None, *, scatter_dim: int | None = None,
        overlapped: bool = False,
    ) -> Callable[[], Tensor]:  # fmt: skip
        """a [.., K/P], all tokens -> [.., N], all tokens or this rank's; weight sharded along its `k_dim`.

        This rank's are those of its part of sequence_dim under SP, else of `scatter_dim`, all if that is None. The
        first communication starts now; the returned function does the rest and returns the result. `overlapped`: what
        the caller computes meanwhile takes about as long.
        """
        dim = self.sequence_dim if self.sequence_parallel else scatter_dim
        scatter = dim is not None and self.group.size > 1
        lead = list(a.shape[:-1])
        if scatter and dim is not None:
            a = a.movedim(dim, 0) if dim else a
            sequence = lead.pop(dim) // self.group.size
            lead = [sequence, *lead]
        product = start_product(
            flatten_tokens(a),
            ShardedWeight(weight, k_dim, self.stride, self.group, self.grad),
            bias=bias,
            scatter_rows=scatter,
            owner_map=self.owner_map,
            gemm_fn=self.gemm_fn,
            overlapped=overlapped,
        )

        def finish() -> Tensor:
            c = _shaped(self, product(), (*lead, weight.shape[1 - k_dim]))
            if not scatter or not dim:
                return c
            c = c.movedim(0, dim).contiguous()
            return fresh_view(c, c.shape) if c._is_view() else c  # where it was contiguous: one sequence

        return finish


def flatten_tokens(x: Tensor) -> Tensor:
    """[.., features] -> [T, features]; a view where strides allow."""
    if x.dim() < 3:
        return x if x.dim() == 2 else x.unsqueeze(0)
    # view takes half of flatten's host time
    return x.view(-1, x.shape[-1]) if x.is_contiguous() and x.numel() else x.flatten(0, -2)


def _local(
    call: LinearCall, a: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """a [.., K] @ weight [K, N], or weightᵀ of [N, K] if `transposed`, (+ bias), nothing sharded along K."""
    key, known = repeat_products(call.gemm_fn, ("product", transposed), a, weight, bias)
    if known is not None:
        (product,) = known
        c: Tensor = product(a.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr())
        return c
    rows, b = flatten_tokens(a), weight.t() if transposed else weight
    shape = (*a.shape[:-1], b.shape[1])
    c = _shaped(call, gemm(call.gemm_fn, rows, b, bias=bias), shape)
    if key is not None and _is_same_memory(rows, a):
        remember_products(key, (rows, b, bias, a.dtype, shape))
    return c


def _is_same_memory(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether flatten_tokens has made no copy."""
    return x is y or (x is not None and y is not None and x.data_ptr() == y.data_ptr())


def _shaped(call: LinearCall, c: Tensor, shape: tuple[int, ...]) -> Tensor:
    """c [T, N] as `shape`, contiguous. A user's gemm_fn may return other strides, or a tensor that it still holds."""
    return reshape_in_place(c, shape) if uses_bundled(call.gemm_fn) else fresh_view(c.contiguous(), shape)


def _wgrad(call: LinearCall, rows: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    if call.main_grad is None:
        return gemm(call.gemm_fn, rows.t(), x, out_dtype=weight.dtype)
    gemm_into(call.gemm_fn, rows.t(), x, call.main_grad.buffer(), accumulate=call.main_grad.accumulate)
    return call.main_grad.done(weight)


def _needs_weight_grad(ctx: Any) -> bool:
    return ctx.needs_input_grad[1] if ctx.call.main_grad is None else is_asked_for(ctx, 1)


def _weight_grads(
    ctx: Any, weight: Tensor, dy: Callable[[], Tensor] | None, x: Callable[[], Tensor] | None
) -> tuple[Tensor | None, Tensor | None]:
    """dw and db, each None unless autograd needs it. dy() and x() return all tokens; None where they are not needed."""
    need_w, need_b = _needs_weight_grad(ctx), ctx.needs_input_grad[2]
    if not need_w and not need_b:
        return None, None
    assert dy is not None and (x is not None or not need_w)
    all_dy, all_x, bias_dtype = dy(), x() if need_w and x is not None else None, ctx.bias_dtype if need_b else None
    gemm_fn, main_grad = ctx.call.gemm_fn, ctx.call.main_grad
    key = known = dw = db = None
    if main_grad is None:
        facts = "weight and bias gradients", weight.dtype, bias_dtype
        key, known = repeat_products(gemm_fn, facts, all_dy, all_x)
    if known is not None:
        (of_weight, of_bias, ones), at = known, all_dy.data_ptr()
        if all_x is not None:
            dw = of_weight(at, all_x.data_ptr())
        return dw, None if of_bias is None else of_bias(ones, at)
    rows, x_rows = flatten_tokens(all_dy), None if all_x is None else flatten_tokens(all_x)
    if x_rows is not None:
        dw = _wgrad(ctx.call, rows, x_rows, weight)
    if bias_dtype is not None:
        db = column_sums(gemm_fn, rows, out_dtype=bias_dtype)
    if key is not None and _is_same_memory(rows, all_dy) and _is_same_memory(x_rows, all_x):
        of_weight = None if dw is None else (rows.t(), x_rows, None, weight.dtype, dw.shape)
        if db is None:
            remember_products(key, of_weight, None, None)
        elif (ones := ones_that_stay(rows)) is not None:
            remember_products(key, of_weight, (ones, rows, None, bias_dtype, db.shape), ones.data_ptr())
    return dw, db


def _gradients_of_one_rank(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """backward of each kind of layer in a group of one rank, where nothing is sharded."""
    x, weight = _Linear.saved_tensors_of(ctx)
    call: LinearCall = ctx.call
    need_x, need_w, need_b, *_ = ctx.needs_input_grad
    key = known = None
    if call.main_grad is None:
        bias_dtype = ctx.bias_dtype if need_b else None
        key, known = repeat_products(call.gemm_fn, ("gradients", need_x, need_w, bias_dtype), dy, x, weight)
    if known is not None:
        (of_x, of_weight, of_bias, ones), at = known, dy.data_ptr()
        return (
            None if of_x is None else of_x(at, weight.data_ptr()),
            None if of_weight is None else of_weight(at, x.data_ptr()),
            None if of_bias is None else of_bias(ones, at),
            None,
        )
    given = dy
    if not dy.is_contiguous():
        dy = flatten_tokens(dy).view(dy.shape)  # one copy for all products
    dx = _local(call, dy, weight) if need_x else None
    dw, db = _weight_grads(ctx, weight, lambda: dy, lambda: x)
    if key is None:
        return dx, dw, db, None
    rows, x_rows = flatten_tokens(dy), flatten_tokens(x)
    if _is_same_memory(rows, given) and _is_same_memory(x_rows, x):
        ones = None if db is None else ones_that_stay(rows)
        of_x = None if dx is None else (rows, weight, None, dy.dtype, dx.shape)
        of_weight = None if dw is None else (rows.t(), x_rows, None, weight.dtype, dw.shape)
        of_bias = None if db is None or ones is None else (ones, rows, None, db.dtype, db.shape)
        if (of_x or of_weight) and (of_bias is None) == (db is None):
            remember_products(key, of_x, of_weight, of_bias, None if ones is None else ones.data_ptr())
    return dx, dw, db, None


def _release_if_exclusive(gathered: Pending | None) -> None:
    """Releases a gather that is not shared. Call it once all kernels that read the result have been launched."""
    if gathered is not None and gathered.exclusive:
        gathered.release()


def _unless_computed(weight: Tensor) -> Tensor | None:
    """A parameter, which lives as long as its model; not a cast, which hooks on saved tensors may mean to be freed.

    A weak reference could be dead on one rank and alive on another, and what is gathered goes by the object.
    """
    return weight if weight.grad_fn is None else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> None:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        ctx.weight, ctx.tokens, ctx.gather, ctx.noted = _unless_computed(weight), None, None, None

    @staticmethod
    def saved_tensors_of(ctx: Any) -> tuple[Tensor, Tensor]:
        """x and weight. Hooks on saved tensors (checkpointing) may return another tensor object with the weight's
        memory. Then this returns the weight itself, which is the key in the weight cache."""
        x, weight = ctx.saved_tensors
        original = ctx.weight
        if original is None or original is weight:
            return x, weight
        state = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for t in (original, weight)]
        return x, original if state[0] == state[1] else weight


class ColumnLinear(_Linear):
    """Column-parallel: y_shard_n = x_full w_shard_nᵀ + b_shard_n.

    x   [.., K] whole, or x_seq_shard under SP     w [N/P, K]     b [N/P] or None     y [.., N/P], all tokens
    dx = dy W, summed over N, which is sharded: by an owner map; shaped as x. Where x is what gather_sequence returned,
    and nobody else reads its gradient, dx is this rank's tokens (regions.py)
    dw = dy_shard_nᵀ x_full        db = column sums of dy_shard_n
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        _Linear.save(ctx, x, weight, bias, call)
        if call.group.size == 1:
            return _local(call, x, weight, bias, transposed=True)
        if call.sequence_parallel and call.grad:
            # Hooks on saved tensors (checkpointing) may mean x to be freed: it is not held for backward then.
            hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            x_held, gathers = None if hooked else x, ctx.needs_input_grad[1]
            ctx.tokens = shared_tokens.called_with(x_held, call.sequence_dim, call.group, gathers=gathers)
        ctx.gather = None if call.sequence_parallel or not call.grad else gather_of(x, call.group)
        gathered = call.start_gather_tokens(x, weight)
        try:
            return _local(call, gathered.wait(), weight, bias, transposed=True)
        finally:
            _release_if_exclusive(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        if call.group.size == 1:
            return _gradients_of_one_rank(ctx, dy)
        x, weight = _Linear.saved_tensors_of(ctx)
        if ctx.tokens is not None:
            ctx.tokens.x = None
        need_w = _needs_weight_grad(ctx)
        x_full = call.start_gather_tokens(x, weight) if need_w else None
        of_part = ctx.noted if ctx.gather is None else dim_of_part_read(x, ctx.gather)
        dgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = call.start_product(dy, weight, 0, scatter_dim=of_part, overlapped=need_w)
        try:
            dw, db = _weight_grads(ctx, weight, lambda: dy, None if x_full is None else x_full.wait)
        finally:
            _release_if_exclusive(x_full)
            del x_full  # frees its memory before dgrad
        dx = None if dgrad is None else dgrad()
        return dx if dx is None or of_part is None else among_unread_parts(dx, of_part, call.group), dw, db, None


class RowLinear(_Linear):
    """Row-parallel: y = x W ᵀ + b, summed over K, which is sharded: by an owner map.

    x   [.., K/P], all tokens     w [N, K/P]     b [N] whole or None     y [.., N] whole, or y_seq_shard under SP
    dx = dy_full w_shard_k         dw = dy_fullᵀ x_shard_k        db = column sums of dy_full
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        _Linear.save(ctx, x, weight, bias, call)
        if call.group.size == 1:
            return _local(call, x, weight, bias, transposed=True)
        if call.sequence_parallel and call.grad:
            ctx.tokens = shared_tokens.before(call.group)
        return call.start_product(x, weight, 1, bias)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        if call.group.size == 1:
            return _gradients_of_one_rank(ctx, dy)
        x, weight = _Linear.saved_tensors_of(ctx)
        gathered = Pending(dy, None)
        if call.sequence_parallel:  # dgrad, wgrad and the bias gradient share this gather
            gathered = moves.start_gather_dim(dy, call.sequence_dim, call.group)
        dy_full = gathered.wait()
        shared_tokens.start(ctx.tokens, weight_cache.ahead_in_graphs)
        ctx.tokens = None
        try:
            dx = _local(call, dy_full, weight) if ctx.needs_input_grad[0] else None
            return dx, *_weight_grads(ctx, weight, lambda: dy_full, lambda: x), None
        finally:
            gathered.release()


class ReplicatedLinear(_Linear):
    """A replicated weight: y = x Wᵀ + b. Under SP the tokens are sharded; dw and db are sums over all ranks' tokens.

    x [.., K]     w [N, K]     b [N] or None     y [.., N]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        _Linear.save(ctx, x, weight, bias, call)
        return _local(call, x, weight, bias, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        if call.group.size == 1:
            return _gradients_of_one_rank(ctx, dy)
        x, weight = _Linear.saved_tensors_of(ctx)
        need_x, _, need_b, *_ = ctx.needs_input_grad
        need_w = _needs_weight_grad(ctx)
        dy_full = call.start_gather_tokens(dy).wait if need_w or need_b else None
        x_full = call.start_gather_tokens(x).wait if need_w else None
        dx = _local(call, dy, weight) if need_x else None
        return dx, *_weight_grads(ctx, weight, dy_full, x_full), None


class ExpandBias(torch.autograd.Function):
    """bias [N] -> a view of shape [.., N], so that this function, not the caller, sums the gradient over tokens.

    `tokens_sharded`: the view belongs to a y_seq_shard, so its gradient is gathered over ranks before the sum.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, lead: Sequence[int], tokens_sharded: bool, call: LinearCall) -> Tensor:
        ctx.call, ctx.tokens_sharded = call, tokens_sharded
        return bias.expand(*lead, bias.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        full = ctx.call.gather_tokens(grad) if ctx.tokens_sharded else grad
        return column_sums(ctx.call.gemm_fn, flatten_tokens(full)), None, None, None


# --- as ops ---------------------------------------------------------------------------------------------------------


def _linear_op(
    function: type[_Linear], name: str, scale: Callable[[LinearCall], tuple[int, int]], note: Callable | None = None
) -> Callable:
    """scale: call -> (m, d): under SP, y has m / d times as many tokens as x."""

    def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> list[Tensor]:
        shape = [*x.shape[:-1], weight.shape[0]]
        if call.sequence_parallel:
            more, fewer = scale(call)
            shape[call.sequence_dim] = shape[call.sequence_dim] * more // fewer
        return [x.new_empty(shape)]

    def restore(ctx: Any, dtypes: Sequence[torch.dtype | None], call: LinearCall) -> None:
        ctx.call, ctx.bias_dtype = call, dtypes[2]
        ctx.weight, ctx.tokens, ctx.gather = _unless_computed(ctx.saved_tensors[1]), None, None

    return as_custom_op(
        function, name=name, tensors=("x", "weight", "bias?"), outputs=outputs, saved=(0, 1), restore=restore,
        makes_all=True, note=note,
    )  # fmt: skip


def _dim_of_part_read(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> int | None:
    return None if call.sequence_parallel else dim_gathered(x, call.group)


column_linear = _linear_op(ColumnLinear, "column_linear", lambda call: (call.group.size, 1), _dim_of_part_read)
row_linear = _linear_op(RowLinear, "row_linear", lambda call: (1, call.group.size))
replicated_linear = _linear_op(ReplicatedLinear, "replicated_linear", lambda call: (1, 1))


def without_custom_op(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """function.apply without a custom op: torch.compile breaks the graph there.

    An op must not write to a tensor that is not among its arguments, as main_grad would be.
    """

    def apply(*args: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function.apply, reason="weight.main_grad is added to")(*args)
        return function.apply(*args)

    return apply


column_linear_into_main_grad = without_custom_op(ColumnLinear)
row_linear_into_main_grad = without_custom_op(RowLinear)
replicated_linear_into_main_grad = without_custom_op(ReplicatedLinear)


def _restore_bias(ctx: Any, dtypes: Any, lead: Any, tokens_sharded: bool, call: LinearCall) -> None:
    ctx.tokens_sharded, ctx.call = tokens_sharded, call


expand_bias = as_custom_op(
    ExpandBias,
    name="expand_bias",
    tensors=("bias",),
    outputs=lambda bias, lead, tokens_sharded, call: [bias.new_empty((*lead, bias.shape[0]))],
    restore=_restore_bias,
)
