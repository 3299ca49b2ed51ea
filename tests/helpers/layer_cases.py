"""Cases of the layers: built from a seed for any degree, run forward and backward, their results gathered whole.

A Case says what the full layer and its data are; `run(tp_group, case)` gives, on every rank, the full outputs and
gradients after some micro-batches, so that degrees can be compared byte for byte. `run(None, case.as_reference)` is
TP=1, and `check_accuracy` compares TP=1 with float64 and with torch's own layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.comm.collectives import gather_major, resolve_group
from tp_invariant.core.layout import shard, unshard
from tp_invariant.layers.parameters import named_shard_specs


@dataclasses.dataclass(frozen=True)
class Case:
    parallel_mode: str | None
    in_features: int
    out_features: int
    tokens: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bias: bool = True
    stride: int | tuple[int, ...] = 1  # a tuple: partition_sizes
    sequence_parallel: bool = False
    sequence_dim: int = 0
    owner_map: str = "auto"
    norm: str | None = None  # a LayerNormLinear
    zero_centered: bool = False
    return_norm: bool = False
    return_norm_gathered: bool = False
    gather_output: bool = False
    input_is_parallel: bool = True
    return_bias: bool = False
    late_stride: bool = False  # set weight.partition_stride after construction, as Megatron does
    micro_batches: int = 2
    mode: bool = True
    device: str = "cpu"
    gemm_fn: Callable | None = None
    backend: str | None = None  # of torch.compile, with fullgraph=True; None: not compiled

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def as_reference(self) -> Case:
        """What TP=1 is asked: the same layer; how it is spread over ranks does not matter there."""
        return self.with_(owner_map="auto", sequence_parallel=False, late_stride=False, backend=None)


def wide(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random data whose sums show their order: exponents over 2^-6 to 2^6 (fp16: 2^-2 to 2^2, to stay in range)."""
    spread = 2 if dtype == torch.float16 else 6
    scale = torch.exp2(torch.randint(-spread, spread + 1, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def full_data(case: Case) -> dict[str, Tensor]:
    """The full layer's parameters, and inputs and output gradients for each micro-batch."""
    g = torch.Generator().manual_seed(1234)
    n, k, dtype = case.out_features, case.in_features, case.dtype
    data = {"weight": wide(n, k, generator=g, dtype=dtype)}
    if case.bias:
        data["bias"] = wide(n, generator=g, dtype=dtype)
    if case.norm:
        data["layer_norm_weight"] = wide(k, generator=g, dtype=dtype)
        if case.norm == "LayerNorm":
            data["layer_norm_bias"] = wide(k, generator=g, dtype=dtype)
    for step in range(case.micro_batches):
        data[f"x{step}"] = wide(*case.tokens, k, generator=g, dtype=dtype)
        data[f"dy{step}"] = wide(*case.tokens, n, generator=g, dtype=dtype)
        if case.return_norm:
            data[f"dn{step}"] = wide(*case.tokens, k, generator=g, dtype=dtype)
    return data


def build(case: Case, tp_group: Any) -> tpi.Linear:
    options: dict[str, Any] = dict(
        bias=case.bias,
        parallel_mode=case.parallel_mode,
        tp_group=tp_group,
        sequence_parallel=case.sequence_parallel,
        sequence_dim=case.sequence_dim,
        partition_stride=1 if case.late_stride or isinstance(case.stride, tuple) else case.stride,
        partition_sizes=case.stride if isinstance(case.stride, tuple) else None,
        gather_output=case.gather_output,
        input_is_parallel=case.input_is_parallel,
        return_bias=case.return_bias,
        gemm_fn=case.gemm_fn,
        owner_map=case.owner_map,
        device=case.device,
        dtype=case.dtype,
    )
    if case.norm:
        layer: tpi.Linear = tpi.LayerNormLinear(
            case.in_features,
            case.out_features,
            normalization=case.norm,
            zero_centered_gamma=case.zero_centered,
            return_layernorm_output=case.return_norm,
            return_layernorm_output_gathered=case.return_norm_gathered,
            **options,
        )
    else:
        layer = tpi.Linear(case.in_features, case.out_features, **options)
    if case.late_stride:
        layer.weight.partition_stride = case.stride
    return layer


@dataclasses.dataclass
class Piece:
    """A rank's part of a result, along `dim`; the whole of it for None, and once all parts are put together."""

    local: Tensor
    dim: int | None
    stride: int | tuple[int, ...] = 1


def run_local(tp_group: Any, case: Case) -> dict[str, Piece | None]:
    """Forward and backward over the micro-batches on one rank; this rank's part of every result."""
    group = resolve_group(tp_group)
    world, rank = group.size, group.rank
    data = {name: tensor.to(case.device) for name, tensor in full_data(case).items()}
    tokens_sharded = case.sequence_parallel and world > 1

    def split_tokens(t: Tensor) -> Tensor:
        return shard(t, dim=case.sequence_dim, rank=rank, world=world) if tokens_sharded else t.clone()

    def split_features(t: Tensor, really: bool) -> Tensor:
        return shard(t, dim=-1, rank=rank, world=world, stride=case.stride) if really else t.clone()

    def by_tokens(t: Tensor) -> Piece:
        return Piece(t.detach(), case.sequence_dim if tokens_sharded else None)

    def by_features(t: Tensor, really: bool) -> Piece:
        return Piece(t.detach(), t.dim() - 1 if really else None, case.stride)

    column, row = case.parallel_mode == "column", case.parallel_mode == "row"
    x_by_features = row and case.input_is_parallel
    y_by_features = column and not case.gather_output
    results: dict[str, Piece | None] = {}
    with tpi.set_tp_invariant_mode(case.mode):
        layer = build(case, tp_group)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(layer.shard_spec(name).local(data[name]))
        call = layer
        if case.backend:
            torch.compiler.reset()  # code compiled for other cases counts towards its limit
            call = torch.compile(layer, backend=case.backend, fullgraph=True)
        for step in range(case.micro_batches):
            x, dy = data[f"x{step}"], data[f"dy{step}"]
            x_local = split_features(x, True) if x_by_features else (x.clone() if row else split_tokens(x))
            dy_local = split_features(dy, y_by_features) if column else split_tokens(dy)
            x_local.requires_grad_()
            out = call(x_local)
            parts = list(out) if isinstance(out, tuple) else [out]
            y, grads = parts.pop(0), [dy_local]
            outputs = [y]
            if case.return_bias:
                bias = parts.pop(0)
                outputs = [y if bias is None else y + bias]
            if case.return_norm:
                normed, whole = parts.pop(0), case.return_norm_gathered or not tokens_sharded
                dn = data[f"dn{step}"]
                outputs.append(normed)
                grads.append(dn.clone() if whole else split_tokens(dn))
                results[f"normed{step}"] = by_features(normed, False) if whole else by_tokens(normed)
            torch.autograd.backward(outputs, grads)
            results[f"y{step}"] = by_features(outputs[0], y_by_features) if column else by_tokens(outputs[0])
            assert x_local.grad is not None
            results[f"dx{step}"] = by_features(x_local.grad, x_by_features) if row else by_tokens(x_local.grad)
    for name, p, spec in named_shard_specs(layer):
        results[f"d_{name}"] = None if p.grad is None else Piece(p.grad, spec.dim, spec.stride)
    return results


def run(tp_group: Any, case: Case) -> dict[str, Any]:
    """Every result of the case, in its full shape, on the CPU."""
    return run_all(tp_group, [case])[0]


def run_all(tp_group: Any, cases: list[Case]) -> list[dict[str, Any]]:
    """`run` of each; all results are gathered at once, since a gather for each would take longer than the layers do."""
    group = resolve_group(tp_group)
    results = [run_local(tp_group, case) for case in cases]
    split = [p for pieces in results for p in pieces.values() if p is not None and p.dim is not None]
    if group.size > 1 and split:
        everyone = gather_major(torch.cat([p.local.flatten().view(torch.uint8) for p in split]), group)
        for piece, parts in zip(split, everyone.split([p.local.nbytes for p in split], dim=1), strict=True):
            shards = [part.clone().view(piece.local.dtype).view(piece.local.shape) for part in parts]
            piece.local = unshard(shards, dim=piece.dim, stride=piece.stride)
    return [{name: piece and piece.local.cpu() for name, piece in pieces.items()} for pieces in results]


def assert_cases_invariant(cases: list[Case], degree: int, device: str = "cpu") -> None:
    """Every case at `degree` against TP=1 in this process, byte for byte, on every rank."""
    references = {case.as_reference: None for case in cases}
    for case in references:
        references[case] = run(None, case)  # type: ignore[assignment]
    for rank, results in enumerate(tpi.testing.run_ranks(run_all, degree, cases, device=device)):
        for case, result in zip(cases, results, strict=True):
            try:
                tpi.testing.assert_bitwise_equal(result, references[case.as_reference])
            except AssertionError as error:
                raise AssertionError(f"rank {rank} of {degree}, {case}: {error}") from None


def torch_results(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same layer written with torch's own functions in `dtype`, for one micro-batch after another."""
    data = {name: t.to(dtype) for name, t in full_data(case).items()}
    params = {name: t.requires_grad_() for name, t in data.items() if name[-1].isalpha()}
    results = {}
    for step in range(case.micro_batches):
        x = data[f"x{step}"].requires_grad_()
        normed = x
        if case.norm:
            gamma = params["layer_norm_weight"] + 1 if case.zero_centered else params["layer_norm_weight"]
            if case.norm == "RMSNorm":
                normed = F.rms_norm(x, (case.in_features,), gamma, 1e-5)
            else:
                normed = F.layer_norm(x, (case.in_features,), gamma, params["layer_norm_bias"], 1e-5)
        y = F.linear(normed, params["weight"], params.get("bias"))
        torch.autograd.backward([y], [data[f"dy{step}"]])
        results[f"y{step}"], results[f"dx{step}"] = y.detach(), x.grad
    results |= {f"d_{name}": p.grad for name, p in params.items()}
    return results


def error(got: Tensor, exact: Tensor) -> float:
    """Norm-wise relative error."""
    return float((got.double() - exact).norm() / exact.norm())


def check_accuracy(case: Case) -> None:
    """TP=1 in the mode is as near to float64 as torch: 1.1x its error for 16-bit dtypes, 2x for fp32."""
    ours, exact, theirs = (
        run(None, case.as_reference),
        torch_results(case, torch.float64),
        torch_results(case, case.dtype),
    )
    allowed = 2.0 if case.dtype == torch.float32 else 1.1
    for name, exact_value in exact.items():
        ours_error, their_error = error(ours[name], exact_value), error(theirs[name], exact_value)
        floor = 4 * torch.finfo(torch.float32).eps  # both round fp32 sums; below this the comparison is noise
        assert ours_error <= max(allowed * their_error, floor), f"{name}: {ours_error} against {their_error} ({case})"
