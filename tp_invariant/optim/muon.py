"""Muon on sharded matrices: the update is computed from whole matrices, the same bits at every degree.

Muon replaces the momentum M of a matrix by an approximation of the nearest (semi-)orthogonal matrix, by Newton-Schulz
iterations. That takes the whole matrix: of a shard it is another matrix. One step, of all matrices over a group:

    1. local      momentum and Nesterov's sum, element by element, on each rank's part; rounded to bfloat16
    2. exchange   an all-to-all gives each matrix whole to one rank, its owner: which one is free (the owner-computes
                  rule), and goes by the number of operations, so that each rank has its share
    3. local      Newton-Schulz on the owner; products by the gemm_fn
    4. exchange   an all-to-all returns to each rank its part of the result
    5. local      weight decay and the step, element by element

Matrices that every rank holds whole, and DTensors that several mesh dims shard, are computed on every rank.

Element by element means here that each operation is a call of torch of its own, in float32, rounded once: torch's lerp
and its sums with a factor round otherwise at the end of a tensor on a CPU, and where that is depends on the degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..comm.collectives import Group, exchange_flat, on_mesh
from ..core.dtensors import is_dtensor, local_of
from ..core.graph_breaks import outside_of_graphs
from ..core.layout import Stride, piece_sizes, shard, unshard
from ..core.mode import is_tp_invariant_mode_enabled
from ..gemm.gemm_fn import GemmFn, check_signature, gemm, gemm_fn_name
from ..kernels.select import select
from ..layers.grad_norm import ClipCall
from ..layers.grad_partial_sums import SINGLE_RANK, HeldGradient, local_part, mesh_shards, partition_dim_of
from ..layers.parameters import stride_of

_COMPARED = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn", "split_stacked")


class Muon(torch.optim.Muon):
    """torch.optim.Muon for parameters of this library's layers: DTensors, plain shards, and whole ones.

        muon = tpi.optim.Muon([p for p in model.layers.parameters() if p.dim() == 2], lr=0.02)

    As torch's, it is for the matrices of hidden layers: embeddings, heads, biases and norms belong to AdamW. Parameters
    are [rows, cols], floating point; the products are bfloat16, and the step is computed in float32 at least.
    Arguments and state (`momentum_buffer`) are torch's. The values are torch's on the whole matrix up to rounding:
    torch rounds each product to bfloat16 before it adds, this class after. With the mode off the same is computed with
    torch's matmul.

    Args:
        split_stacked: a weight that says that it is stacked of several matrices, by partition_stride (a gated layer's
            [gate; up]) or partition_sizes ([q; k; v]), is taken as these: each one is made orthogonal, and gets the
            learning rate of its own shape, as if it had a layer of its own. False: as one matrix, which is what
            torch.optim.Muon does with the whole parameter. Can be set for each parameter group. Layers say it at TP=1,
            too. Other ways to stack, such as Megatron's query groups, are not known: one matrix.
        gemm_fn: for the products (see `tp_invariant.Linear`).
        lr .. adjust_lr_fn: torch.optim.Muon's.
    """

    takes_shards = True  # for `check`

    def __init__(
        self, params: Any, *args: Any, split_stacked: bool = True, gemm_fn: GemmFn | None = None, **kwargs: Any
    ):
        self.gemm_fn = check_signature(gemm_fn)
        super().__init__(params, *args, **kwargs)
        self.defaults["split_stacked"] = split_stacked
        for options in self.param_groups:
            options.setdefault("split_stacked", split_stacked)

    @torch.no_grad()
    @outside_of_graphs("it moves bytes between ranks, and a compiler may compute products in another order")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. A collective: every rank must step the same parameters, in the same order.

        Raises:
            ValueError, TypeError, RuntimeError: as `tp_invariant.clip_grad_norm_`, of the gradients; also of one that
                a DeviceMesh and a tp_group of plain shards cut both.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owner_of = [(p, options) for options in self.param_groups for p in options["params"]]
        call = ClipCall([p for p, _ in owner_of], None)
        named = {f"the {key} of each group": tuple(o[key] for o in self.param_groups) for key in _COMPARED}
        call.agree("Muon.step", named | {"the gemm_fn": gemm_fn_name(self.gemm_fn, call.device)})
        matrices = [self._matrix(held, owner_of[held.number][1]) for held in call.with_grad]
        by_group: dict[Group, list[_Matrix]] = {}  # in the order of the parameters, the same on every rank
        for matrix in matrices:
            by_group.setdefault(matrix.group, []).append(matrix)
        for group, here in by_group.items():
            for matrix, update in zip(here, _orthogonalised(here, group, self.gemm_fn), strict=True):
                _apply(matrix, update)
        return loss

    def _matrix(self, held: HeldGradient, options: dict[str, Any]) -> _Matrix:
        p = held.parameter
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer, grad, momentum = local_of(state["momentum_buffer"]), local_part(p.grad), options["momentum"]
        wide = torch.promote_types(grad.dtype, torch.float32)
        scaled = grad.to(wide) * (1 - momentum)
        buffer.copy_(buffer.to(wide) * momentum + scaled)
        update = scaled + buffer.to(wide) * momentum if options["nesterov"] else buffer
        return _described(p, held.label, held.over, update.to(torch.bfloat16), options)


class _Matrix(NamedTuple):
    """The update of one parameter, and how it is sharded.

    update    this rank's part, bfloat16; the whole update where `group` is SINGLE_RANK
    shape     of the whole parameter
    dim, stride, group, sizes   the dim that is sharded, its stacked pieces, over which ranks, and each one's size of it
    pieces    (the dim, the pieces) of the matrices that are made orthogonal one by one; (0, 1) for one
    """

    parameter: Tensor
    options: dict[str, Any]
    update: Tensor
    shape: tuple[int, int]
    dim: int
    stride: Stride
    group: Group
    sizes: list[int]
    pieces: tuple[int, Stride]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        return tuple(self.sizes[rank] if dim == self.dim else size for dim, size in enumerate(self.shape))

    def elements(self, rank: int) -> int:
        return math.prod(self.shape_on(rank))

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """From all ranks' flat parts."""
        shaped = [part.view(self.shape_on(rank)) for rank, part in enumerate(parts)]
        return torch.cat(shaped, self.dim) if self.stride == 1 else unshard(shaped, dim=self.dim, stride=self.stride)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Each rank's flat part."""
        if self.stride == 1:
            return [part.reshape(-1) for part in whole.split(self.sizes, self.dim)]
        cut = partial(shard, whole, dim=self.dim, world=self.group.size, stride=self.stride)
        return [cut(rank=rank).reshape(-1) for rank in range(self.group.size)]

    def piece_shapes(self) -> list[tuple[int, int]]:
        rows, cols = self.shape
        dim, stride = self.pieces
        sizes = piece_sizes(self.shape[dim], stride, 1)
        return [(size, cols) if dim == 0 else (rows, size) for size in sizes]

    def operations(self) -> int:
        return sum(m * n * min(m, n) for m, n in self.piece_shapes())


def _described(p: Tensor, label: str, over: Group, update: Tensor, options: dict[str, Any]) -> _Matrix:
    """label: what errors call it. over: the group over which p is sharded by its attributes, or SINGLE_RANK."""
    dim, stride = partition_dim_of(p) or 0, stride_of(p)
    pieces = dim, stride
    group, shape = over, list(update.shape)
    if not is_dtensor(p):
        shape[dim] *= over.size
        sizes = [update.shape[dim]] * over.size
    else:
        shape = list(p.shape)
        axes = [axis for axis, placement in enumerate(p.placements) if not placement.is_replicate()]
        shards = [
            (axis, *at) for axis, at in zip(axes, mesh_shards(p, on_mesh(p.device_mesh)), strict=True) if at[0].size > 1
        ]
        if shards and over.size > 1:
            raise ValueError(
                f"{label} with shape {tuple(shape)} on rank {over.rank} is a DTensor placed as {p.placements} of "
                "a part over tp_group (fully_shard of plain shards): for Muon make the layers with tp_group as a "
                "DeviceMesh"
            )
        factors = [(q.dim, q.split_factor) for q in p.placements if getattr(q, "split_factor", 1) > 1]  # type: ignore[attr-defined]
        if not hasattr(p, "partition_dim") and len(factors) == 1:  # fully_shard drops the attributes
            at = [q for q in p.placements if getattr(q, "dim", None) == factors[0][0]]
            pieces = factors[0] if len(at) == 1 else pieces
        if len(shards) > 1:
            from torch.distributed.tensor import DTensor  # slow to import

            part = DTensor.from_local(
                update, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            update, shards = part.full_tensor(), []
        if shards:
            ((axis, group, dim),) = shards
            stride = getattr(p.placements[axis], "split_factor", 1)
            most = -(-shape[dim] // group.size)  # torch.chunk's rule
            sizes = [max(0, min(most, shape[dim] - rank * most)) for rank in range(group.size)]
        else:
            group, sizes = SINGLE_RANK, [shape[dim]]
    rows, cols = shape
    return _Matrix(
        p, options, update, (rows, cols), dim, stride, group, sizes, pieces if options["split_stacked"] else (0, 1)
    )


# --- who computes what ----------------------------------------------------------------------------------------------


def _orthogonalised(matrices: Sequence[_Matrix], group: Group, gemm_fn: GemmFn | None) -> list[Tensor]:
    """This rank's part of each matrix's result, flat or in shape, bfloat16."""
    if group.size == 1:
        return [_whole_update(matrix, matrix.update.view(matrix.shape), gemm_fn) for matrix in matrices]
    ranks = range(group.size)
    owned = _by_owner(matrices, group.size)
    mine = [matrices[i] for i in owned[group.rank]]
    ordered = [i for rank in ranks for i in owned[rank]]
    # [rank][owner]: how many elements of the owner's matrices a rank holds
    amounts = [[sum(matrices[i].elements(rank) for i in owned[owner]) for owner in ranks] for rank in ranks]
    sent, received = amounts[group.rank], [amounts[rank][group.rank] for rank in ranks]
    alike = [count for row in amounts for count in row]
    flat = torch.cat([matrices[i].update.reshape(-1) for i in ordered])
    blocks = [
        block.split([matrix.elements(rank) for matrix in mine])
        for rank, block in enumerate(exchange_flat(flat, sent, received, group, alike).split(received))
    ]
    results = [
        matrix.parts(_whole_update(matrix, matrix.whole([block[i] for block in blocks]), gemm_fn))
        for i, matrix in enumerate(mine)
    ]
    back = torch.cat([flat.new_empty(0), *(parts[rank] for rank in ranks for parts in results)])
    returned = exchange_flat(back, received, sent, group, alike).split(
        [matrices[i].elements(group.rank) for i in ordered]
    )
    by_index = dict(zip(ordered, returned, strict=True))
    return [by_index[i] for i in range(len(matrices))]


def _by_owner(matrices: Sequence[_Matrix], size: int) -> list[list[int]]:
    """The indices of each rank's own matrices: the largest first, each to the rank that has the least to compute."""
    owned: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    work = [matrix.operations() for matrix in matrices]
    for i in sorted(range(len(matrices)), key=lambda i: (-work[i], i)):
        rank = load.index(min(load))
        owned[rank].append(i)
        load[rank] += work[i]
    return owned


# --- one matrix -----------------------------------------------------------------------------------------------------


def _whole_update(matrix: _Matrix, whole: Tensor, gemm_fn: GemmFn | None) -> Tensor:
    dim, stride = matrix.pieces
    pieces = whole.split(piece_sizes(whole.shape[dim], stride, 1), dim)
    return torch.cat([newton_schulz(piece, matrix.options, gemm_fn) for piece in pieces], dim)


def newton_schulz(m: Tensor, options: dict[str, Any], gemm_fn: GemmFn | None) -> Tensor:
    """An approximately orthogonal matrix for m [rows, cols], bfloat16: X = aX + (bA + cA²)X, A = XXᵀ, ns_steps times.

    X starts as m / |m|, transposed if it has more rows than columns. Each step rounds A, bA + cA² and X to bfloat16.
    """
    if not m.numel():
        return m
    a, b, c = options["ns_coefficients"]
    multiply = partial(gemm, gemm_fn) if is_tp_invariant_mode_enabled() else _stock_product
    tall = m.shape[0] > m.shape[1]
    x = (m.t() if tall else m).contiguous()
    kernels = select("gradient norm", x.device.type)
    norm = kernels.fold(kernels.sums_of_squares([x], [0])).sqrt().clamp(min=options["eps"])
    x = (x.float() / norm).bfloat16()
    for _ in range(options["ns_steps"]):
        gram = multiply(x, x.t(), out_dtype=torch.bfloat16)
        polynomial = (multiply(gram, gram, out_dtype=torch.float32) * c + gram.float() * b).bfloat16()
        x = (multiply(polynomial, x, out_dtype=torch.float32) + x.float() * a).bfloat16()
    return x.t() if tall else x


def _stock_product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    return (a @ b).to(out_dtype)


def _apply(matrix: _Matrix, update: Tensor) -> None:
    p, options = matrix.parameter, matrix.options
    lr, local = float(options["lr"]), local_of(p)
    if matrix.group == SINGLE_RANK and is_dtensor(p) and update.numel() != local.numel():
        update = _own_part(p, update)
    update = update.view(local.shape)
    wide = torch.promote_types(local.dtype, torch.float32)
    factors = [lr * _lr_ratio(shape, options["adjust_lr_fn"]) for shape in matrix.piece_shapes()]
    if len(set(factors)) == 1:
        change = update.to(wide) * factors[0]
    else:  # partition_sizes: of each piece a rank has one part
        dim, stride = matrix.pieces
        widths = [size // matrix.group.size for size in piece_sizes(matrix.shape[dim], stride, matrix.group.size)]
        parts = zip(update.split(widths, dim), factors, strict=True)
        change = torch.cat([part.to(wide) * factor for part, factor in parts], dim)
    local.copy_(local.to(wide) * (1 - lr * options["weight_decay"]) - change)
    if is_dtensor(p):
        increment_version(p)


def _own_part(p: Any, whole: Tensor) -> Tensor:
    """This rank's part of what every rank holds whole, placed as p; moves nothing."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = p.device_mesh
    replicated = DTensor.from_local(whole.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, p.placements).to_local()


def _lr_ratio(shape: tuple[int, int], adjust_lr_fn: str | None) -> float:
    """torch.optim.Muon's: of a matrix [rows, cols], so that its update's size does not depend on its shape."""
    rows, cols = shape
    return 0.2 * math.sqrt(max(rows, cols)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
