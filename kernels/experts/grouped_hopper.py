"""Weight gradients by expert on Hopper, in Gluon: the sums of grouped_tma.py's `outer`, with loads that run ahead.

An expert's rows are the K of its weight gradient, often a few hundred, so that a tile takes as few as four steps.
grouped_tma.py's kernel starts to load a tile's operands when the tile before is stored; the compiler joins the loops
over tiles and over K only where every tile has as many steps. Here the loads of the next tile are under way while a
tile is being stored: what is to be loaded next is kept apart from what is computed now.

Imported by the first call that needs it, because Gluon has no interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .. import plans


@gluon.jit
def _decode(
    tile, total, offsets_ptr, tiles_m, tiles_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A tile's expert, row and column, its expert's rows, its steps, at least one; past `total` the last tile's."""
    tile = gl.minimum(tile, total - 1)
    expert = tile // (tiles_m * tiles_n)
    first = gl.load(offsets_ptr + expert)
    count = gl.load(offsets_ptr + expert + 1) - first
    number = tile % (tiles_m * tiles_n)
    group = number // (GROUP_M * tiles_n)
    group_rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    in_group = number % (GROUP_M * tiles_n)
    row = (group * GROUP_M + in_group % group_rows) * BLOCK_M
    col = in_group // group_rows * BLOCK_N
    return expert, row, col, first, count, gl.maximum((count + BLOCK_K - 1) // BLOCK_K, 1)


@gluon.jit
def _load(
    a_desc, b_desc, a_ring, b_ring, full, number, first, count, step, row, col, wanted,
    STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Starts loading a step's operands into their place, which the product of STAGES steps before has read."""
    place = number % STAGES
    end = first + count
    at = 1073741824 - count + step * BLOCK_K  # TMA loads zeros past the expert's rows: see grouped_tma.py
    mbarrier.expect(full.index(place), BYTES, pred=wanted)
    tma.async_copy_global_to_shared(
        a_desc, [1073741824, end, at, row], full.index(place), a_ring.index(place), pred=wanted
    )
    tma.async_copy_global_to_shared(
        b_desc, [1073741824, end, at, col], full.index(place), b_ring.index(place), pred=wanted
    )


@gluon.jit
def _store(c, stored, c_desc, expert, row, col):
    tma.store_wait(0)  # what was stored before has been read
    stored.store(c.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [expert, row, col], stored)


@gluon.jit(do_not_specialize=["offsets_ptr", "experts", "M", "N"])
def outer_ahead_kernel(
    a_desc, b_desc, c_desc, offsets_ptr, experts, M, N,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_M], dtype)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], dtype)
    PART: gl.constexpr = BLOCK_N // 2 if HALVES else BLOCK_N
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, PART], dtype)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    total = tiles_m * tiles_n * experts
    programs = gl.num_programs(0)

    a_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_M], A_LAYOUT)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], B_LAYOUT)
    stored = gl.allocate_shared_memory(c_desc.dtype, [BLOCK_M, PART], C_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()

    # what is loaded next: step `step` of tile `next_tile`
    next_tile = gl.program_id(0)
    _, row, col, first, count, steps = _decode(
        next_tile, total, offsets_ptr, tiles_m, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M
    )
    step = gl.to_tensor(0)
    for s in gl.static_range(STAGES - 1):
        _load(
            a_desc, b_desc, a_ring, b_ring, full, s, first, count, step, row, col, next_tile < total,
            STAGES, BLOCK_K, BYTES,
        )  # fmt: skip
        step += 1
        if step == steps:
            step = gl.to_tensor(0)
            next_tile += programs
            _, row, col, first, count, steps = _decode(
                next_tile, total, offsets_ptr, tiles_m, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M
            )

    number = gl.to_tensor(0)  # of a step, over all tiles of this program
    for tile in range(gl.program_id(0), total, programs):
        expert, to_row, to_col, _, _, own_steps = _decode(
            tile, total, offsets_ptr, tiles_m, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M
        )
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, ACC)
        for _ in range(0, own_steps):
            place = number % STAGES
            mbarrier.wait(full.index(place), number // STAGES & 1)
            acc = warpgroup_mma(a_ring.index(place).permute([1, 0]), b_ring.index(place), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            _load(
                a_desc, b_desc, a_ring, b_ring, full, number + STAGES - 1, first, count, step, row, col,
                next_tile < total, STAGES, BLOCK_K, BYTES,
            )  # fmt: skip
            step += 1
            if step == steps:
                step = gl.to_tensor(0)
                next_tile += programs
                _, row, col, first, count, steps = _decode(
                    next_tile, total, offsets_ptr, tiles_m, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M
                )
            number += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        acc = acc + 0.0  # no negative zero, as in matmul.py
        if HALVES:
            left, right = gl.split(gl.permute(gl.reshape(acc, [BLOCK_M, 2, PART]), [0, 2, 1]))
            _store(left, stored, c_desc, expert, to_row, to_col)
            _store(right, stored, c_desc, expert, to_row, to_col + PART)
        else:
            _store(acc, stored, c_desc, expert, to_row, to_col)
    tma.store_wait(0)


outer_ahead = plans.Kernel(outer_ahead_kernel)
