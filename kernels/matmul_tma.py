"""The matrix product on Hopper: the same sums as matmul.py's kernel, fed by the tensor memory accelerator (TMA).

A persistent grid, one program for each multiprocessor, walks the output tiles; K is walked in order into one fp32
accumulator, exactly as in matmul.py, so the bits are the same and this is a choice of speed alone. An operand stands in
memory either as its name says ([M, K], [K, N]) or transposed; TMA loads the tile as it stands and the tensor core reads
it the other way round, so all three of a linear layer's products (X Wᵀ, dY W, dYᵀ X) run without a copy.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .matmul_configs import MatmulConfig

_ALIGNMENT = 16  # bytes; of a TMA base address and of its row stride


@triton.jit(do_not_specialize=["steps"])
def _persistent_matmul_kernel(
    a_desc, b_desc, c_desc, bias_ptr,
    M, N, steps, stride_bias,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    # flattened with the K loop, so that the loads of the next tile start while this one is being stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        group = tile // tiles_in_group
        group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        in_group = tile % tiles_in_group
        row = (group * GROUP_M + in_group % group_rows) * BLOCK_M
        col = (in_group // group_rows) * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(0, steps):
            k = step * BLOCK_K
            # what lies past the edges of M, N and K arrives as zeros
            if A_TRANSPOSED:
                a = a_desc.load([k, row]).T
            else:
                a = a_desc.load([row, k])
            if B_TRANSPOSED:
                b = b_desc.load([col, k]).T
            else:
                b = b_desc.load([k, col])
            acc = tl.dot(a, b, acc)

        acc += 0.0  # no negative zero, as in matmul.py
        if HAS_BIAS:
            cols = col + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + cols * stride_bias, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            # half a tile at a time takes half the shared memory, which buys the loads another stage
            split = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(split)
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([row, col], acc.to(c_desc.dtype))


def _tma_layout(x: Tensor) -> bool | None:
    """Whether TMA can address the matrix x: False as it stands, True as its transpose, None not at all."""
    if x.data_ptr() % _ALIGNMENT:
        return None
    unit = x.element_size()
    for transposed, (outer, inner) in ((False, (0, 1)), (True, (1, 0))):
        stride = x.stride(outer)
        if x.stride(inner) == 1 and stride >= x.shape[inner] and stride * unit % _ALIGNMENT == 0:
            return transposed
    return None


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def tma_layouts(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> tuple[bool, bool] | None:
    """(a stands transposed, b stands transposed) where this kernel can take a @ b, else None."""
    if a.dtype not in (torch.bfloat16, torch.float16) or not a.is_cuda or not _is_hopper(a.device.index):
        return None
    if b.shape[1] * out_dtype.itemsize % _ALIGNMENT:  # c's row stride
        return None
    layouts = _tma_layout(a), _tma_layout(b)
    return None if layouts[0] is None or layouts[1] is None else (layouts[0], layouts[1])


def tma_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    layouts: tuple[bool, bool],
    config: MatmulConfig,
) -> Tensor:
    """c = a @ b (+ bias) for operands that `tma_layouts` accepts; arguments checked by matmul.matmul."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=out_dtype)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    a_transposed, b_transposed = layouts

    def descriptor(x: Tensor, transposed: bool, block: list[int]) -> TensorDescriptor:
        if transposed:
            x, block = x.t(), block[::-1]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block)

    programs = min(_multiprocessors(a.device.index), triton.cdiv(m, block_m) * triton.cdiv(n, block_n))
    _persistent_matmul_kernel[(programs,)](
        descriptor(a, a_transposed, [block_m, block_k]),
        descriptor(b, b_transposed, [block_k, block_n]),
        descriptor(c, False, [block_m, block_n // 2 if config.halves else block_n]),
        c if bias is None else bias,
        m, n, triton.cdiv(k, block_k), 0 if bias is None else bias.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, HAS_BIAS=bias is not None, HALVES=config.halves,
        PROGRAMS=programs, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return c
