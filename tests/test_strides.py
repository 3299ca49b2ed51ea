"""The results of the library have the same strides at every degree: outputs, and gradients of inputs.

torch's own operators around the layers depend on strides: a sum over the tokens of a gradient, for example, adds in
another order if the gradient is transposed, and its bits would then depend on the degree. Each public module and
function is called with inputs and gradients in every common layout, and the strides of the results are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.core.layout import shard
from tp_invariant.functional.regions import gather_sequence, scatter_sequence
from tp_invariant.gemm import gemm

DEGREES = (2, 3)
K, N = 24, 36
Strides = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # by name: shape and strides


# --- layouts --------------------------------------------------------------------------------------------------------


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def transposed(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def tokens_swapped(x: Tensor) -> Tensor:
    return x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 1 else x


def sliced(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def expanded(x: Tensor) -> Tensor:
    """As the gradient of a sum is."""
    return x.flatten()[:1].expand(x.shape) if x.numel() else x


LAYOUTS = (contiguous, transposed, tokens_swapped, sliced, expanded)


# --- what is called -------------------------------------------------------------------------------------------------

Call = tuple[Callable[..., Any], list[Tensor]]  # what is called, and this rank's inputs, contiguous


def linear(tp_group: Any, tokens: tuple[int, ...], kind: type = tpi.Linear, **options: Any) -> Call:
    group = resolve_group(tp_group)
    layer = kind(K, N, tp_group=tp_group, **options)
    x = torch.randn(*tokens, K)
    if options.get("parallel_mode") == "row" and options.get("input_is_parallel", True):
        return layer, [shard(x, dim=-1, rank=group.rank, world=group.size, stride=options.get("partition_stride", 1))]
    sharded = options.get("sequence_parallel") and options.get("parallel_mode") != "row"
    return layer, [_sequence_shard(x, group, options.get("sequence_dim", 0)) if sharded else x]


def _sequence_shard(x: Tensor, group: Any, dim: int) -> Tensor:
    return shard(x, dim=dim, rank=group.rank, world=group.size)


def norm(tp_group: Any, tokens: tuple[int, ...], heads: bool = False, **options: Any) -> Call:
    group = resolve_group(tp_group)
    if heads:
        layer = tpi.ParallelNorm(8, heads=6, heads_dim=len(tokens), tp_group=tp_group, **options)
        return layer, [torch.randn(*tokens, 6 // group.size, 8) + group.rank]
    layer = tpi.ParallelNorm(K, tp_group=tp_group, sequence_parallel=True, **options)
    return layer, [_sequence_shard(torch.randn(*tokens, K), group, options.get("sequence_dim", 0))]


def embedding(tp_group: Any, tokens: tuple[int, ...], **options: Any) -> Call:
    ids = torch.randint(0, 48, tokens)
    layer = tpi.VocabParallelEmbedding(48, K, tp_group=tp_group, **options)
    return lambda: layer(ids), []


def cross_entropy(tp_group: Any, tokens: tuple[int, ...], **options: Any) -> Call:
    target, group = torch.randint(0, 48, tokens), resolve_group(tp_group)
    loss = functools.partial(tpi.vocab_parallel_cross_entropy, tp_group=tp_group, **options)
    return lambda logits: loss(logits, target), [torch.randn(*tokens, 48 // group.size) + group.rank]


def attention(tp_group: Any, tokens: tuple[int, ...]) -> Call:
    group = resolve_group(tp_group)
    batch, sequence = (1, *tokens)[-2:]
    q, k, v = (torch.randn(batch, heads // group.size, sequence, 8) for heads in (12, 6, 6))
    return functools.partial(tpi.attention, causal=True), [q, k, v]


def region(tp_group: Any, tokens: tuple[int, ...], function: Callable, sequence_dim: int) -> Call:
    group, x = resolve_group(tp_group), torch.randn(*tokens, K)
    x = _sequence_shard(x, group, sequence_dim) if function is gather_sequence else x
    return lambda x: function(x, tp_group, sequence_dim), [x]


def other_gemm(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """One whose results are transposed, which a gemm_fn may give."""
    c = gemm(None, b.t(), a.t(), out_dtype=torch.float32).t()
    return (c if bias is None else c + bias).to(out_dtype or a.dtype)


column, row = dict(parallel_mode="column"), dict(parallel_mode="row")
CASES: dict[str, Callable[..., Call]] = {
    "whole": functools.partial(linear),
    "column": functools.partial(linear, **column),
    "column, stride 2, return_bias": functools.partial(linear, partition_stride=2, return_bias=True, **column),
    "column, gather_output, stride 2": functools.partial(
        linear, gather_output=True, partition_stride=2, return_bias=True, **column
    ),
    "row": functools.partial(linear, owner_map="cols", **row),
    "row, return_bias": functools.partial(linear, return_bias=True, owner_map="rows", **row),
    "row, whole input": functools.partial(linear, input_is_parallel=False, **row),
    "row, whole input, stride 2": functools.partial(linear, input_is_parallel=False, partition_stride=2, **row),
    "column, other gemm_fn": functools.partial(linear, gemm_fn=other_gemm, gather_output=True, **column),
    "row, other gemm_fn": functools.partial(linear, gemm_fn=other_gemm, input_is_parallel=False, **row),
    "norm and column": functools.partial(
        linear, kind=tpi.LayerNormLinear, return_layernorm_output=True, return_bias=True, **column
    ),
    "norm of heads": functools.partial(norm, heads=True),
    "embedding": embedding,
    "cross-entropy": functools.partial(cross_entropy, reduction="none"),
    "cross-entropy, mean": functools.partial(cross_entropy, label_smoothing=0.1, vocab_size=46),
    "attention": attention,
}
IN_SEQUENCE: dict[str, Callable[..., Call]] = {
    "whole": functools.partial(linear, sequence_parallel=True),
    "column": functools.partial(linear, sequence_parallel=True, owner_map="cols", **column),
    "row": functools.partial(linear, sequence_parallel=True, owner_map="cols", return_bias=True, **row),
    "row by rows, whole input": functools.partial(
        linear, sequence_parallel=True, owner_map="rows", input_is_parallel=False, partition_stride=2, **row
    ),
    "norm and column": functools.partial(
        linear,
        kind=tpi.LayerNormLinear,
        sequence_parallel=True,
        return_layernorm_output=True,
        return_layernorm_output_gathered=True,
        **column,
    ),
    "norm": norm,
    "embedding": functools.partial(embedding, sequence_parallel=True),
    "gather_sequence": functools.partial(region, function=gather_sequence),
    "scatter_sequence": functools.partial(region, function=scatter_sequence),
}


def every_case() -> Iterator[tuple[str, Callable[..., Call], tuple[int, ...]]]:
    for name, case in CASES.items():
        for tokens in ((2, 6), (1, 6), (2, 0)):
            yield f"{name} of {tokens}", case, tokens
    for name, case in IN_SEQUENCE.items():
        for tokens, dim in (((6, 2), 0), ((2, 6), 1), ((1, 6), 1), ((6,), 0), ((0, 6), 1)):
            yield f"{name} in a sequence along {dim} of {tokens}", functools.partial(case, sequence_dim=dim), tokens


def observed(tp_group: Any) -> Strides:
    """Shapes and strides of all outputs and input gradients of every case, input layout and gradient layout."""
    found: Strides = {}
    with tpi.set_tp_invariant_mode(True):
        for name, case, tokens in every_case():
            torch.manual_seed(0)
            call, inputs = case(tp_group, tokens)
            pairs = [(layout, contiguous) for layout in LAYOUTS] + [(contiguous, layout) for layout in LAYOUTS[1:]]
            for layout, of_gradients in pairs if inputs else pairs[:1]:
                laid_out = [layout(x).detach().requires_grad_() for x in inputs]
                given = call(*laid_out)
                outputs = [y for y in (given if isinstance(given, tuple) else (given,)) if y is not None]
                named = {f"output {i}": y for i, y in enumerate(outputs)}
                if laid_out:
                    reach = [y for y in outputs if y.requires_grad]
                    grads = [of_gradients(torch.randn(y.shape)) if y.dim() else torch.ones(()) for y in reach]
                    of_inputs = torch.autograd.grad(reach, laid_out, grads)
                    named |= {f"gradient of input {i}": g for i, g in enumerate(of_inputs)}
                for what, t in named.items():
                    found[f"{name}, {layout.__name__}, gradient {of_gradients.__name__}: {what}"] = (
                        tuple(t.shape),
                        t.stride(),
                    )
    return found


def order(shape: tuple[int, ...], strides: tuple[int, ...], dims: list[int]) -> tuple[Any, ...]:
    """The order of `dims` in memory, those that are expanded, and whether there are gaps between elements."""
    dense, expected = True, 1
    for dim in sorted((d for d in dims if strides[d]), key=lambda d: strides[d]):
        dense &= strides[dim] == expected
        expected *= shape[dim]
    return sorted(dims, key=lambda d: -strides[d]), [d for d in dims if not strides[d]], dense


def differences(whole: Strides, part: Strides) -> list[str]:
    """The names of results whose layout differs at another degree, without dims of one element and empty tensors."""
    assert whole.keys() == part.keys()
    out = []
    for name, (shape, strides) in whole.items():
        part_shape, part_strides = part[name]
        dims = [d for d in range(len(shape)) if shape[d] > 1 and part_shape[d] > 1]
        if 0 in shape or 0 in part_shape:
            same = True
        elif shape == part_shape:
            same = all(strides[d] == part_strides[d] for d in dims)
        else:
            same = order(shape, strides, dims) == order(part_shape, part_strides, dims)
        if not same:
            out.append(f"{name}: {shape} {strides} and {part_shape} {part_strides}")
    return out


@pytest.mark.more
def test_strides_are_the_same_at_every_degree():
    (whole,) = run_ranks(observed, 1)
    for degree in DEGREES:
        for rank, part in enumerate(run_ranks(observed, degree)):
            different = differences(whole, part)
            assert not different, f"rank {rank} of {degree}, {len(different)} of {len(whole)}:\n" + "\n".join(different)


# --- what depends on it ---------------------------------------------------------------------------------------------


def broadcast_grads(tp_group: Any) -> list[Tensor]:
    """Gradients of tensors that torch broadcasts over the tokens before and after layers; torch's own sums."""
    torch.manual_seed(0)
    before, between, after = (torch.zeros(size, requires_grad=True) for size in (K, N, K))
    row = tpi.Linear(K, N, parallel_mode="row", input_is_parallel=False, partition_stride=2, tp_group=tp_group)
    wide = testing.wide_randn(130, K, generator=torch.Generator().manual_seed(1), spread=6)
    with tpi.set_tp_invariant_mode(True):
        y = row(wide + before) + between
        x = scatter_sequence((wide + after).t().contiguous().t()[:129], tp_group)
        z = gather_sequence(x, tp_group)
    scale = testing.wide_randn(130, N, generator=torch.Generator().manual_seed(2), spread=6)
    ((y * scale).sum() + (z * scale[:129, :K]).sum()).backward()
    return [t.grad for t in (before, between, after)]


def test_sums_of_torch_over_the_tokens_are_the_same_at_every_degree():
    (whole,) = run_ranks(broadcast_grads, 1)
    for got in run_ranks(broadcast_grads, 3):
        testing.assert_bitwise_equal(got, whole)


def test_the_result_of_a_region_shares_no_memory():
    """Changing it in place does not change the input, at TP=1 as at every other degree."""
    for function in (gather_sequence, scatter_sequence):
        x = torch.ones(4, 3)
        function(x, None).add_(1)
        assert x.eq(1).all()
        with pytest.raises(IndexError, match="sequence_dim=2 is out of range"):
            function(x, None, 2)
