"""Compiles every kernel for a Hopper GPU, down to machine code, on any machine. Prints their names.

A process of its own: without TRITON_INTERPRET, and with a driver that launches nothing. The public functions of the
kernels are called as on a GPU, so the kernels are compiled for the arguments and options that they get there.
"""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tp_invariant.functional.gated import ACTIVATIONS
from tp_invariant.kernels import peer_flags, peer_moves, plans
from tp_invariant.kernels.attention import backward as attention_backward
from tp_invariant.kernels.attention import forward as attention
from tp_invariant.kernels.attention import spec as attention_spec
from tp_invariant.kernels.experts import grouped, grouped_tma, routing
from tp_invariant.kernels.gemm import aligned_copies, batched, matmul, matmul_tma
from tp_invariant.kernels.gemm.matmul_configs import fit
from tp_invariant.kernels.grad_norm import kernel as grad_norm
from tp_invariant.kernels.rowwise import add_norm, gated, norm, rope, softmax
from tp_invariant.kernels.rowwise.reference_gated import halves
from tp_invariant.kernels.vocabulary import cross_entropy, draw, embedding, loss_spec

HOPPER = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448, major=9, minor=0)
compiled: set[str] = set()


class Launcher:
    """In place of the one that Triton compiles."""

    def __init__(self, src: Any, metadata: Any) -> None:
        compiled.add(f"{Path(src.fn.fn.__code__.co_filename).stem}.{src.fn.__name__}")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class NoGPU:
    """What Triton requires of a driver before a launch and in place of it."""

    launcher_cls = Launcher
    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
        load_binary=lambda name, binary, shared, device: (0, 0, 32, 0, 1024),
        unload_module=lambda module: None,
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def hopper():
    modules = (
        add_norm, attention, attention_backward, batched, cross_entropy, draw, embedding, gated, grad_norm, grouped,
        matmul, norm, rope, routing, softmax,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in (*modules, peer_flags, peer_moves):
            stack.enter_context(mock.patch.object(module, "launch_on", lambda *args: contextlib.nullcontext()))
        for name, value in (("get_device_properties", HOPPER), ("get_device_capability", (9, 0))):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *args, value=value: value))
        stack.enter_context(mock.patch.object(norm, "can_overlap", lambda index: True))
        driver.set_active(NoGPU())
        yield stack


# Each option of a kernel is compiled, and few of their combinations: a form of the attention takes a second or two.


def products(dtype: torch.dtype, tma: bool) -> None:
    a, b, bias = torch.zeros(256, 512, dtype=dtype), torch.zeros(512, 384, dtype=dtype), torch.zeros(384, dtype=dtype)
    plans._plans.clear()  # which hold whether TMA is used
    layouts = [(a, b), (a, b.t().contiguous().t()), (a.t().contiguous().t(), b), (a[:3], b)]
    with mock.patch.object(matmul_tma, "supports_tma", lambda *args: tma):
        for x, y in layouts[: 1 if dtype == torch.float32 else None]:
            matmul.matmul(x, y, bias=bias)
        matmul.matmul(a, b, out=torch.zeros(256, 384), accumulate=True)
        matmul.matmul(a, b, out_dtype=torch.float32, promote_every=256)
        for k_dim in (0, 1):
            major = torch.zeros(2, *((256, 384) if k_dim == 0 else (384, 256)), dtype=dtype)
            assert (matmul.matmul_rank_major(a.view(2, 256, 256), major, b_k_dim=k_dim) is not None) == tma
    if not tma:
        batched.batched_matmul(a[None], b[None])
        for columns in (383, 382, 380):  # in units of one element, two and four
            aligned_copies._copy(torch.zeros(256, columns, dtype=dtype))


def experts(dtype: torch.dtype) -> None:
    """With the tiles that few rows of an expert get, and many."""
    for rows, count, hidden, inner in ((256, 16, 512, 384), (4096, 8, 2048, 1536))[
        : 1 if dtype == torch.float32 else 2
    ]:
        x, dy = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(rows, inner, dtype=dtype)
        offsets = torch.arange(0, rows + 1, rows // count, dtype=torch.int32)
        weight = torch.zeros(1, inner, hidden, dtype=dtype).expand(count, -1, -1)
        with mock.patch.object(grouped, "_fitted", lambda config, a: fit(config, a.element_size(), 232448)):
            grouped.grouped_matmul(x, weight.mT, offsets, bias=torch.zeros(count, inner))
            grouped.grouped_matmul(dy, weight, offsets)
            grouped.grouped_outer(dy, x, offsets)
            grouped.grouped_outer(dy[:, :8], x, offsets, out_dtype=torch.float32)


def experts_by_tma(dtype: torch.dtype) -> None:
    """With each tile that the number of rows decides, and both forms of each kernel."""
    hidden, inner = 512, 384
    weight = torch.zeros(8, inner, hidden, dtype=dtype)
    with mock.patch.object(grouped_tma, "supports_tma", lambda *args: True):
        for average in (40, 100, 300, 1000):
            x, dy = torch.zeros(8 * average, hidden, dtype=dtype), torch.zeros(8 * average, inner, dtype=dtype)
            offsets = torch.arange(0, 8 * average + 1, average, dtype=torch.int32)
            grouped.grouped_matmul(x, weight.mT, offsets, bias=torch.zeros(8, inner))
            grouped.grouped_matmul(dy, weight, offsets)
            grouped.grouped_outer(dy, x, offsets)
        grouped.grouped_matmul(x, weight.mT, offsets, out_dtype=torch.float32)
        grouped.grouped_outer(dy, x, offsets, out_dtype=torch.float32)


def routes(dtype: torch.dtype) -> None:
    rows, scores, weights = (torch.zeros(*shape, dtype=dtype) for shape in ((64, 1000), (16, 128), (16, 4)))
    routing.top_k(scores, 4)
    places = torch.zeros(16, 4, dtype=torch.int64)
    routing.combine(rows, weights.float(), places)
    routing.combine(rows, None, places)
    routing.combine_backward_rows(rows[:16], weights, places.view(-1))
    routing.gather_rows(rows, places.view(-1), 4)
    routing.spread_rows(rows[:16], places)
    routing.sort_by_expert(places, 128)
    chosen = routing.choose(
        scores.float(), scores.float(), weights.shape[1], normalize=True, epsilon=0.0, scale=1.0, out_dtype=dtype
    )  # fmt: skip
    routing.choose_backward(*chosen, experts=scores.shape[1], scale=1.0)
    for h in (1000, 2048, 20000):  # of each length one compiled form, however the tensors lie in memory
        wide = torch.zeros(64, h + 48, dtype=dtype)
        for x in (torch.zeros(64, h, dtype=dtype), wide[:, :h], wide[:, 1 : h + 1]):
            routing.combine_backward_weights(x[:16], x, places)
            routing.combine_backward(x[:16], weights, x, places)
        routing.combine_backward_weights(x[:1], x, places.view(-1)[1:4].view(1, 3))


def norms(dtype: torch.dtype) -> None:
    for h, rms in ((4096, dtype == torch.float32), (1000, dtype != torch.float32), (20000, dtype == torch.float32)):
        x, w = torch.zeros(64, h, dtype=dtype), torch.zeros(h, dtype=dtype)
        y, mean, rstd = norm.norm_forward(x, w, None if rms else w, eps=1e-5, rms=rms, zero_centered=rms)
        options = dict(rows_per_sum=32, rms=rms, zero_centered=rms, with_bias=not rms)
        _, sums = norm.norm_backward(y, x, w, mean, rstd, **options)
        norm.fold_weight_gradients(sums, dtype, None if rms else dtype)


def gates(dtype: torch.dtype) -> None:
    x = torch.zeros(16, 1000, dtype=dtype)
    for activation in ("silu", "gelu_tanh"):
        gated.gated_forward(x, x, activation)
        gated.gated_backward(x, x, x, activation)
    pair = halves(torch.zeros(16, 2000, dtype=dtype), interleaved=True)
    gated.gated_backward(x, *pair, "clamped_silu", out=pair)


def fused(dtype: torch.dtype) -> None:
    """What parallelize puts in the place of torch's operators; the options do not meet the dtype."""
    every = dtype == torch.bfloat16
    x, pair = torch.zeros(16, 1000, dtype=dtype), torch.zeros(16, 2000, dtype=dtype).chunk(2, dim=-1)
    for activation in ACTIVATIONS if every else ("silu",):
        gated.torch_gated_forward(x, x, activation)
        gated.torch_gated_backward(x, x, x, activation)
    gated.torch_gated_backward(x, *pair, "silu", out=pair)
    q, k = torch.zeros(2, 7, 4, 96, dtype=dtype).transpose(1, 2), torch.zeros(2, 7, 2, 96, dtype=dtype).transpose(1, 2)
    cos = torch.zeros(1, 7, 80, dtype=dtype)
    for interleaved in (False, True)[: 2 if every else 1]:
        rope.rope(q, k, cos, cos, interleaved=interleaved)
        rope.rope(q, None, cos, cos, interleaved=interleaved, backward=True)
    for h, rms in ((4096, dtype == torch.float32), (1000, dtype != torch.float32), (20000, dtype == torch.float32)):
        x, w = torch.zeros(64, h, dtype=dtype), torch.zeros(h, dtype=dtype)
        add_norm.add_norm_forward(x, x, w, None if rms else w, eps=1e-5, rms=rms, zero_centered=rms)


def losses(dtype: torch.dtype) -> None:
    logits, ids = torch.zeros(16, 1000, dtype=dtype), torch.zeros(16, dtype=torch.int64)
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.1)):
        spec = loss_spec.LossSpec(1000, -100, smoothing, z_loss)
        extremes = cross_entropy.row_extremes(logits, ids, 1000, 0, spec).expand(3, -1, -1).contiguous()
        sums = cross_entropy.row_sums(logits, ids, 1000, extremes, spec).expand(3, -1, -1).contiguous()
        cross_entropy.token_losses(extremes, sums, ids, 1000, spec)
        losses, stats = cross_entropy.whole_losses(logits, ids.int(), spec)
        for mean in (False, True):
            total, count = cross_entropy.sum_of_tokens(losses, ids, spec, mean=mean)
            grad = total.view(1) if mean else losses
            cross_entropy.logits_grad(grad, logits, ids, stats, count, 1000, 0, spec)
        cross_entropy.row_entropies(logits, ids, 1000, stats, spec)
    embedding.embedding_grad(logits, ids, 100, dtype)
    draw.draw(logits.float(), torch.zeros(16, 2, dtype=torch.int64), 0)
    for log in (False, True):
        softmax.softmax(logits, log=log, out_dtype=dtype)
    softmax.row_sums(logits, divisor=3, out_dtype=dtype)
    softmax.softmax_backward(logits.float(), logits.float(), out_dtype=dtype)


def clipping(dtype: torch.dtype) -> None:
    shapes = ((64, 512), (512, 64), (3, 64, 5), (64,), (33, 51), (51, 33))[: 2 if dtype == torch.float32 else None]
    xs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    grad_norm.fold(grad_norm.sums_of_squares(xs, [0, 1, 1, 0, 0, 1][: len(xs)]))
    grad_norm.scale_(xs, torch.ones(()))
    grad_norm.digests(xs)


def attend(
    own_kernel: bool, head_dim: int, queries: int, *, packed: bool = False, dropped: bool = False,
    paged: bool = False, with_sinks: bool = False, mask_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16, backward: bool = True,
) -> None:  # fmt: skip
    """The forward and, unless it is a step of decoding, the backward. packed: with a window as well; dropped, paged:
    keys of a cache, forward alone."""
    cu = torch.tensor([0, 40, 100] if queries > 1 else [0, 1, 1], dtype=torch.int32)
    of_keys = torch.stack([cu, cu], 1) if dropped else cu
    pages = torch.zeros(2, 100, dtype=torch.int32) if paged else None
    lengths = attention_spec.PackedLengths(cu, of_keys, min(queries, 60), 60 if queries > 1 else 1500, pages)
    lengths = lengths if packed or dropped or paged else None
    spec = attention_spec.AttentionSpec(causal=True, scale=0.1, window=20 if lengths else 0)
    q = torch.zeros(1, 4, queries, head_dim, dtype=dtype)
    k, v = torch.zeros(2, 1, 2, 2048 if queries == 1 else queries, head_dim, dtype=dtype).unbind()
    if paged:
        k, v = torch.zeros(2, 100, 16, 2, head_dim, dtype=dtype).transpose(2, 3).unbind()
    sinks = torch.zeros(4) if with_sinks else None
    mask = None if mask_dtype is None else torch.zeros(1, 4, queries, k.shape[2], dtype=mask_dtype)
    with (
        mock.patch.object(attention, "_has_own_kernel", lambda *args: own_kernel),
        mock.patch.object(attention, "can_overlap", lambda index: own_kernel),
    ):
        out, lse = attention.forward(q, k, v, spec, lengths, sinks, mask)
        if backward and queries > 1 and not dropped and not paged:
            learned = mask is not None and mask.dtype != torch.bool
            attention_backward.backward(out, q, k, v, out, lse, spec, lengths, None, mask, learned)


def attentions(every: bool) -> None:
    attend(False, 128, 100, mask_dtype=torch.bool, backward=every)
    attend(False, 128, 100, mask_dtype=torch.bfloat16, with_sinks=True)
    attend(True, 64, 100, packed=True)
    attend(True, 128, 1)
    attend(True, 128, 100, dropped=True)
    attend(False, 128, 100, paged=True)
    attend(False, 64, 1, paged=True, dtype=torch.float32)
    attend(False, 64, 1, packed=True, dtype=torch.float32)
    if every:
        attend(False, 64, 100, packed=True)
        attend(False, 128, 1, with_sinks=True)
        attend(True, 128, 100, with_sinks=True)
        attend(True, 256, 100)
        attend(True, 96, 100, mask_dtype=torch.bool)
        attend(False, 128, 100, dropped=True)
        attend(False, 128, 1, dropped=True)
        attend(False, 128, 1, paged=True)


def peers() -> None:
    table, states = torch.zeros(4, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    x, out, options = torch.zeros(4, 8), torch.zeros(16, 8), dict(table=table, states=states, rank=0, limit=3)
    peer_moves.peer_gather(x, out, 32, 1, capacity=64, **options)
    for blocks in (1, 4):
        peer_moves.peer_read(x, out, blocks, 32, False, 1, slot=8, **options)
    for operation in ("claim", "arrived", "wait", "free"):
        peer_flags.peer_flags(operation, 0, 1, torch.zeros(2, 2, 4, dtype=torch.int32), table, states, states, 0, 3)


def main() -> None:
    with hopper():
        for dtype in (torch.bfloat16, torch.float32):
            products(dtype, False)
            experts(dtype)
            routes(dtype)
            norms(dtype)
            gates(dtype)
            fused(dtype)
            losses(dtype)
            clipping(dtype)
        products(torch.bfloat16, True)
        experts_by_tma(torch.bfloat16)
        attentions(every="--all-cases" in sys.argv)
        peers()
    print("\n".join(sorted(compiled)))


if __name__ == "__main__":
    main()
