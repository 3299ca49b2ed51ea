"""Experts over ranks: rows travel to the rank that computes their expert, and back. Nothing is added on the way.

Legend: P ranks, T tokens, n of them this rank's, k slots (the experts chosen for a token), E experts, H hidden
features, I inner features. A row is one (token, slot); R rows belong to the experts of this rank.

Which rank computes an expert is an owner map: rank r computes the experts of a consecutive range, by
torch.tensor_split's rule, with their whole weights. An owner sorts its rows by (expert, token, slot), with tokens
numbered as in the whole activation. So a row's products, and the order of a weight gradient's sum over an expert's
rows, are TP=1's at every degree. A token's k rows are added in slot order, in fp32, on the rank that has the token.

            token_rows                 grouped_linear, gate, grouped_linear       combine
    x [n, H] ----> rows [R, H], sorted ---------> outputs [R, H] ---> arrived [n * k, H] ---> y [n, H]

Without sequence parallelism x and the routing are whole on every rank. An owner then takes its rows from them without
communication, and so it does with dy in backward; each rank combines its T/P of the tokens, and the results are
gathered. The number of collectives, and their order, are the same on every rank, also on one without a row.

Over data-parallel ranks (dispatch_over_data) each replica, the ranks of one tp_group, has a micro-batch of its own, of
any number of tokens. An owner sorts its rows by (expert, micro-batch, token, slot), with tokens numbered as in their
micro-batch. A weight gradient then is one partial sum for each micro-batch, over the rows that this micro-batch alone
would have; partial_gradients.py says where they go.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..comm.collectives import Group, exchange_flat, exchange_rows, gather_dim, gather_uneven
from ..core.differentiation import once_differentiable
from ..core.dtensors import local_of
from ..core.elementwise import POSITION_DEPENDENT, position_invariant
from ..core.layout import split_sizes
from ..core.torch_private import TorchDispatchMode, version_of
from ..gemm.gemm_fn import GemmFn
from ..gemm.grouped import grouped_column_sums, grouped_matmul, grouped_outer
from ..kernels.select import select
from .partial_gradients import is_wanted, partial_gradients_of
from .vocab import check_id_dtype, check_ids

# --- which rank computes which row ----------------------------------------------------------------------------------

MAX_ROWS = 2**31  # offsets are int32


def _check_rows(rows: int) -> None:
    if rows >= MAX_ROWS:
        raise ValueError(f"experts get {rows} rows on a rank, one for each token and slot; allowed: fewer than 2**31")


@dataclass(frozen=True)
class Dispatch:
    """How the rows of one call travel.

    order      [R]      of this rank's rows, sorted by (expert, token, slot): token * k + slot, of all tokens; not
                        used if `travels`
    offsets    [E_r+1]  where the rows of each of this rank's experts begin, int32
    arrival    [R]      for each row in the order in which they arrive, by (rank, expert, token, slot): its place in
                        `order`; None for a group of one
    departure  [n * k]  of this rank's tokens, sorted by (expert, token, slot): token * k + slot, of these tokens. In
                        this order rows leave for their owners and come back
    places     [n, k]   the inverse of `departure`
    sent       how many of them each rank owns
    received   how many rows of each rank's tokens this rank owns
    counts     both, for all ranks: rows of rank s that rank q owns at [s * P + q]
    tokens     T, of this rank's micro-batch
    sharded    whether each rank has its own tokens only (sequence parallelism)
    holders    the ranks that hold the same tokens, if not `sharded`: those of tp_group
    travels    whether an owner receives its rows; otherwise it has all tokens, and takes them from there
    parts      [E_r*D+1]  where the rows of each expert and micro-batch begin, int32; None for one micro-batch
    """

    group: Group
    order: Tensor
    offsets: Tensor
    arrival: Tensor | None
    departure: Tensor
    places: Tensor
    sent: list[int]
    received: list[int]
    counts: list[int]
    tokens: int
    sharded: bool
    holders: Group
    travels: bool
    parts: Tensor | None = None

    @property
    def slots(self) -> int:
        return self.places.shape[1]

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's part of x [T, ..]; x itself, [n, ..], if the tokens are sharded."""
        return x if self.sharded else x.split(split_sizes(self.tokens, self.holders.size))[self.holders.rank]

    def all_tokens(self, x: Tensor) -> Tensor:
        """The inverse of own_tokens."""
        return x if self.sharded else gather_uneven(x, 0, self.tokens, self.holders)

    def to_owners(self, rows: Tensor) -> Tensor:
        """Rows of this rank's tokens, by `departure` -> the rows of this rank's experts, by `order`."""
        if self.arrival is None:
            return rows
        arrived = exchange_flat(rows, self.sent, self.received, self.group, self.counts)
        ordered = torch.empty_like(arrived)
        ordered[self.arrival] = arrived
        return ordered

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The inverse of to_owners."""
        if self.arrival is None:
            return rows
        return exchange_flat(rows[self.arrival], self.received, self.sent, self.group, self.counts)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _rank_of(position: Tensor, size: int, world: int) -> Tensor:
    """The rank in whose piece, by split_sizes, each position lies. By arithmetic: nothing is copied from the host."""
    small, more = divmod(size, world)
    longer = more * (small + 1)
    return torch.where(position < longer, position // (small + 1), more + (position - longer) // max(small, 1))


def expert_range(experts: int, group: Group) -> range:
    """The experts that this rank computes."""
    bounds = [0, *itertools.accumulate(split_sizes(experts, group.size))]
    return range(bounds[group.rank], bounds[group.rank + 1])


def dispatch(index: Tensor, experts: int, group: Group, sequence_dim: int | None) -> Dispatch:
    """How the rows of a routing travel.

    index [.., k]: the experts of each token; this rank's tokens with a sequence_dim, all of them without.

    Under sequence parallelism the index, a few bytes for each row, is gathered; then every rank computes all sizes
    itself. For a group of several ranks the host needs P x P of these sizes, because torch's all-to-all takes them from
    the host: on a GPU it waits once in a call until the routing is computed, which leaves the GPU without work for as
    long as the host then takes to launch the next kernels. Backward needs no further wait.
    """
    k, device, world = index.shape[-1], index.device, group.size
    sharded = sequence_dim is not None
    if world == 1:
        if device.type == "cuda":  # what sorts them asserts on the device that they exist
            check_id_dtype(index, name="top_k_index", rank=group.rank)
        else:
            check_ids(index, experts, name="top_k_index", rank=group.rank)
        _check_rows(index.numel())
        order, places, offsets = select("routing", device.type).sort_by_expert(index.reshape(-1, k), experts)
        rows = [len(order)]
        return Dispatch(
            group, order, offsets, None, order, places, rows, rows, rows, len(places), sharded, group, travels=sharded
        )
    check_ids(index, experts, name="top_k_index", rank=group.rank)
    index = index.int()
    own = index.reshape(-1)
    whole = index if sequence_dim is None else gather_dim(index, sequence_dim, group)
    tokens = whole[..., 0].numel()
    if sequence_dim is None:
        sizes = split_sizes(tokens, world)
        holder = _rank_of(torch.arange(tokens, device=device), tokens, world)
        start = sum(sizes[: group.rank])
        own = own[start * k : (start + sizes[group.rank]) * k]
    else:
        lead = [1] * (whole.dim() - 1)
        lead[sequence_dim] = whole.shape[sequence_dim]
        along = torch.arange(lead[sequence_dim], device=device) // index.shape[sequence_dim]
        holder = along.view(lead).expand(whole.shape[:-1]).reshape(-1)
    flat = whole.reshape(-1)
    pairs = (holder.unsqueeze(1) * world + _rank_of(flat, experts, world).view(tokens, k)).flatten()  # of ranks
    counts: list[int] = pairs.new_zeros(world * world).scatter_add_(0, pairs, torch.ones_like(pairs)).tolist()
    table = [counts[s * world : (s + 1) * world] for s in range(world)]
    _check_rows(max(map(sum, zip(*table, strict=True))))  # the same on every rank
    received = [row[group.rank] for row in table]
    first = sum(sum(row[: group.rank]) for row in table)
    by_expert, order = flat.sort(stable=True)
    mine = slice(first, first + sum(received))
    order, own_experts = order[mine], expert_range(experts, group)
    bounds = torch.arange(own_experts.start, own_experts.stop + 1, device=device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert[mine], bounds, out_int32=True)
    arrival = holder[order // k].argsort(stable=True)
    departure = own.argsort(stable=True)
    places = _inverse(departure).view(len(departure) // k, k)
    sent = table[group.rank]
    return Dispatch(
        group, order, offsets, arrival, departure, places, sent, received, counts, tokens, sharded, group, sharded
    )


def dispatch_over_data(
    index: Tensor,
    experts: int,
    group: Group,
    holders: Group,
    sequence_dim: int | None,
    gather_counts: Callable[[Tensor], list[list[int]]],
) -> Dispatch:
    """How the rows of a routing travel where each replica of `group` has a micro-batch of its own.

    Args:
        index: [.., k], the experts of each token: of this rank's tokens with a sequence_dim, else of its micro-batch.
        holders: the ranks of this replica, consecutive ones of `group`; with a sequence_dim they share its tokens.
        gather_counts: every rank's numbers [P], from this rank's. A collective.

    The sizes of the all-to-alls are all that the ranks gather: with each row goes a number, by which its owner sorts.
    """
    k, device, world, replicas = index.shape[-1], index.device, group.size, group.size // holders.size
    sharded, lead = sequence_dim is not None, list(index.shape[:-1])
    own = index.long().reshape(-1)
    if sequence_dim is not None:
        length = lead[sequence_dim]
        lead[sequence_dim] *= holders.size
        numbers = torch.arange(math.prod(lead), device=device).view(lead)
        numbers = numbers.narrow(sequence_dim, holders.rank * length, length).flatten()
        tokens = math.prod(lead)
    else:
        tokens = math.prod(lead)
        sizes = split_sizes(tokens, holders.size)
        start = sum(sizes[: holders.rank])
        numbers = torch.arange(start, start + sizes[holders.rank], device=device)
        own = own[start * k : (start + sizes[holders.rank]) * k]
    departure = own.argsort(stable=True)
    places = _inverse(departure).view(len(departure) // k, k)
    owner = _rank_of(own, experts, world)
    table = gather_counts(owner.new_zeros(world).scatter_add_(0, owner, torch.ones_like(owner)))
    _check_rows(max(map(sum, zip(*table, strict=True))))
    sent, received = table[group.rank], [row[group.rank] for row in table]
    counts = [count for row in table for count in row]
    part = own * replicas + group.rank // holders.size
    keys = (part << 32) + (numbers.unsqueeze(1) * k + torch.arange(k, device=device)).flatten()
    arrived, order = exchange_flat(keys[departure], sent, received, group, counts).sort()
    mine = expert_range(experts, group)
    bounds = torch.arange(mine.start * replicas, mine.stop * replicas + 1, device=device)
    parts = torch.searchsorted(arrived >> 32, bounds, out_int32=True)
    return Dispatch(
        group, order, parts[::replicas].contiguous(), _inverse(order), departure, places, sent, received, counts,
        tokens, sharded, holders, travels=True, parts=parts,
    )  # fmt: skip


# --- tokens to rows and back ----------------------------------------------------------------------------------------


class TokenRows(torch.autograd.Function):
    """x [T, H], or this rank's [n, H] under sequence parallelism -> the rows of this rank's experts [R, H].

    dx[t] = the sum of drow over the slots of t, in slot order; shaped as x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatched: Dispatch) -> Tensor:
        ctx.call = dispatched
        kernels = select("routing", x.device.type)
        if dispatched.travels or dispatched.arrival is None:
            return dispatched.to_owners(kernels.spread_rows(dispatched.own_tokens(x), dispatched.places))
        return kernels.gather_rows(x, dispatched.order, dispatched.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        dispatched: Dispatch = ctx.call
        combine = select("routing", drows.device.type).combine
        return dispatched.all_tokens(combine(dispatched.to_tokens(drows.contiguous()), None, dispatched.places)), None


class Combine(torch.autograd.Function):
    """rows [R, H] of this rank's experts, weights [T, k] -> y [T, H]; [n, ..] under sequence parallelism.

    y[t] = sum over slots s of weights[t, s] * row of (t, s)        drow = weights[t, s] * dy[t]
    dweights[t, s] = dy[t] . row of (t, s), complete on every rank, computed by the rank that combines the token
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, dispatched: Dispatch) -> Tensor:
        arrived = dispatched.to_tokens(rows)
        ctx.save_for_backward(arrived if ctx.needs_input_grad[1] else None, weights)
        ctx.call = dispatched
        y = select("routing", rows.device.type).combine(arrived, dispatched.own_tokens(weights), dispatched.places)
        return dispatched.all_tokens(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        arrived, weights = ctx.saved_tensors
        dispatched: Dispatch = ctx.call
        kernels = select("routing", dy.device.type)
        drows = dweights = None
        if dispatched.arrival is None and all(ctx.needs_input_grad[:2]):
            drows, dots = kernels.combine_backward(dy, weights, arrived, dispatched.places)
            return drows, dots.to(weights.dtype), None
        if ctx.needs_input_grad[0]:
            if dispatched.travels:
                own = dispatched.own_tokens(dy), dispatched.own_tokens(weights)
                drows = dispatched.to_owners(kernels.combine_backward_rows(*own, dispatched.departure))
            else:
                drows = kernels.combine_backward_rows(dy, weights, dispatched.order)
        if ctx.needs_input_grad[1]:
            dots = kernels.combine_backward_weights(dispatched.own_tokens(dy), arrived, dispatched.places)
            dweights = dispatched.all_tokens(dots.to(weights.dtype))
        return drows, dweights, None


token_rows = TokenRows.apply
combine = Combine.apply


# --- products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertWeight:
    """How the weights of all experts are stored over the ranks: a dim of each expert's matrix, or the experts.

    dim      the dim of [E, .., ..] that is sharded; 0: by expert, then a rank has the experts that it computes.
             None: not sharded, every rank has all of it (a bias of the output)
    stride   in how many stacked pieces a rank holds this dim
    """

    group: Group
    experts: int
    dim: int | None
    stride: int

    def of_owner(self, shard: Tensor) -> Tensor:
        """This rank's part -> the whole tensors of the experts that it computes. An all-to-all, unless dim is 0."""
        if self.group.size == 1 or self.dim == 0:
            return shard
        if self.dim is None:
            mine = expert_range(self.experts, self.group)
            return shard[mine.start : mine.stop]
        major = exchange_rows(shard, split_sizes(self.experts, self.group.size), self.group)
        pattern = "rank e (stride i) ... -> e (stride rank i) ..."
        if self.dim == 2:
            pattern = "rank e k (stride i) -> e k (stride rank i)"
        return rearrange(major, pattern, stride=self.stride)

    def to_shards(self, grad: Tensor) -> Tensor:
        """The inverse of of_owner: the gradients of the experts that this rank computes -> that of its part."""
        if self.group.size == 1 or self.dim == 0:
            return grad
        if self.dim is None:
            return gather_uneven(grad, 0, self.experts, self.group)
        world = self.group.size
        pattern = "e (stride rank i) ... -> rank e (stride i) ..."
        if self.dim == 2:
            pattern = "e k (stride rank i) -> rank e k (stride i)"
        major = rearrange(grad, pattern, rank=world, stride=self.stride)
        sizes = split_sizes(self.experts, world)
        sent = [sizes[self.group.rank]] * world
        return exchange_flat(major.flatten(0, 1).contiguous(), sent, sizes, self.group, sizes)


class GroupedLinear(torch.autograd.Function):
    """y = row W[e]ᵀ + b[e] for the rows of each of this rank's experts e.

    rows [R, K]     weight and bias: this rank's parts of [E, N, K] and [E, N]; transposed: of [E, K, N]     y [R, N]
    drows = dy W[e]        dW[e] = dyᵀ rows        db[e] = column sums of dy, each over the rows of e in their order

    stored: how the weight and the bias are. partial: where their gradients go if not to .grad.

    The weights of the experts are whole in the product only: backward receives them once more. To keep them would take
    as much memory as all parameters of the layer on this rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        stored: tuple[ExpertWeight, ExpertWeight],
        transposed: bool,
        gemm_fn: GemmFn | None,
        partial: PartialSums | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.call, ctx.of_bias = stored
        ctx.transposed, ctx.gemm_fn, ctx.partial = transposed, gemm_fn, partial
        ctx.bias_dtype = None if bias is None else bias.dtype
        w = stored[0].of_owner(weight)
        b = None if bias is None else stored[1].of_owner(bias)
        return grouped_matmul(gemm_fn, rows, w if transposed else w.mT, offsets, bias=b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, offsets = ctx.saved_tensors
        need_rows, need_w, need_b, *_ = ctx.needs_input_grad
        gemm_fn, of_weight, of_bias = ctx.gemm_fn, ctx.call, ctx.of_bias
        dy = dy.contiguous()
        drows = dw = db = None
        if need_rows:
            w = of_weight.of_owner(weight)
            drows = grouped_matmul(gemm_fn, dy, w.mT if ctx.transposed else w, offsets)
        of_parameters: PartialSums | None = ctx.partial
        summed_rows = offsets if of_parameters is None else of_parameters.offsets
        if need_w and (of_parameters is None or of_parameters.is_wanted(0)):
            a, b = (rows, dy) if ctx.transposed else (dy, rows)
            dw = grouped_outer(gemm_fn, a, b, summed_rows, out_dtype=weight.dtype)
        if need_b and (of_parameters is None or of_parameters.is_wanted(1)):
            db = grouped_column_sums(gemm_fn, dy, summed_rows, out_dtype=ctx.bias_dtype)
        if of_parameters is not None:
            of_parameters.add(dw, db)
            return drows, *[None] * 7
        dw = None if dw is None else of_weight.to_shards(dw)
        db = None if db is None else of_bias.to_shards(db)
        return drows, dw, db, None, None, None, None, None


@dataclass(frozen=True, eq=False)
class PartialSums:
    """Where the gradients of a weight and its bias go, one for each of `count` micro-batches, instead of to .grad.

    offsets      Dispatch.parts; or, to make one sum of all micro-batches, which counts as the first one's, its offsets
    parameters   the weight and the bias: the parameters themselves, not copies that autocast makes
    """

    offsets: Tensor
    count: int
    parameters: tuple[Tensor, Tensor | None]

    def is_wanted(self, place: int) -> bool:
        """Whether this backward is to give the gradient of the weight (place 0) or the bias (1)."""
        parameter: Any = self.parameters[place]
        return is_wanted(parameter)

    def add(self, *sums: Tensor | None) -> None:
        """Of the weight and the bias, [E_r * count, ..] or [E_r, ..]; None where there is none.

        Raises:
            RuntimeError: nobody reads them any more: the forward was made when somebody did.
        """
        for parameter, of_all in zip(self.parameters, sums, strict=True):
            if parameter is None or of_all is None:
                continue
            waiting = partial_gradients_of(parameter)
            if waiting is None:
                raise RuntimeError(
                    "the MicroBatchTree that sums the gradients of an expert parameter of shape "
                    f"{tuple(parameter.shape)} was freed between forward and backward: keep it as long as the model is "
                    "trained"
                )
            own = local_of(parameter)
            each = of_all.to(own.dtype).view(len(own), -1, *own.shape[1:]).unbind(1)
            waiting.add(parameter, [*each, *[None] * (self.count - len(each))])


grouped_linear = GroupedLinear.apply


# --- between the products -------------------------------------------------------------------------------------------


class _ByPosition(TorchDispatchMode):
    """On a CPU elementwise operators have bits that do not depend on an element's position (core/elementwise.py)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        return position_invariant(func, args, kwargs) if func in POSITION_DEPENDENT else func(*args, **kwargs)


def check_gate(fn: Callable[[Tensor], Tensor], h: Tensor) -> None:
    """Tries fn on three rows like those of h, which are the same on every rank.

    Raises:
        ValueError: a row's result is not that of the row alone, as fn moves elements between rows, draws random
            numbers, or goes by how many rows there are; or fn takes a tensor that requires a gradient.
    """
    rows = torch.linspace(-3, 3, 3 * h.shape[-1], device="cpu").view(3, -1).to(h.device, h.dtype)
    with torch.enable_grad(), _ByPosition():
        whole, alone = fn(rows.clone()), fn(rows[1:2].clone())
    if whole.requires_grad:
        raise ValueError(
            "the activation or gate_fn of experts takes a tensor that requires a gradient (a parameter), which would "
            "get none: give a function of its input alone, or freeze it"
        )
    if whole.shape[:1] != (3,) or not torch.equal(whole[1:2], alone):
        raise ValueError(
            f"the activation or gate_fn of experts returns {tuple(whole.shape)} for an input of {tuple(rows.shape)}, "
            "and its second row is not what it returns for that row alone: give a function of each row by itself"
        )


class _Gate(torch.autograd.Function):
    """fn(h), h [R, 2 I] -> [R, I], for a function of each row alone, made of elementwise operators.

    An element's bits do not depend on how many rows there are. Backward computes fn once more.

    Raises:
        ValueError: fn changes h in place.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.fn = fn
        version = None if h.is_inference() else version_of(h)
        own = h.detach()  # which requires no gradient, as h does here
        with _ByPosition():
            y = fn(own)
        if version is not None and version_of(h) != version:
            raise ValueError(
                "the activation or gate_fn of experts changes its input in place, which backward needs as it was: give "
                "one that does not (inplace=False)"
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        with _ByPosition():
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                y = ctx.fn(h)
            (dh,) = torch.autograd.grad(y, h, dy)
        return dh, None


gate = _Gate.apply
