"""Cases of Linear and LayerNormLinear: forward and backward over micro-batches, all results gathered whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import resolve_group
from ..core.layout import Stride
from ..core.mode import set_tp_invariant_mode
from ..core.options import Normalization, OwnerMap, ParallelMode
from ..layers.layernorm_linear import LayerNormLinear
from ..layers.linear import Linear
from ..testing.checks import full_grads
from .verify_case import Case, Results, grad_of, part, whole, wide


@dataclasses.dataclass(frozen=True)
class LayerCase(Case):
    """A full layer, its data and its options; `norm` makes it a LayerNormLinear.

    stride: a tuple is partition_sizes.
    late_stride: set weight.partition_stride after construction, as Megatron does.
    """

    parallel_mode: ParallelMode | None
    in_features: int
    out_features: int
    tokens: tuple[int, ...]
    bias: bool = True
    stride: Stride = 1
    sequence_parallel: bool = False
    sequence_dim: int = 0
    owner_map: OwnerMap = "auto"
    norm: Normalization | None = None
    zero_centered: bool = False
    return_norm: bool = False
    return_norm_gathered: bool = False
    gather_output: bool = False
    input_is_parallel: bool = True
    return_bias: bool = False
    late_stride: bool = False
    micro_batches: int = 2
    gemm_fn: Callable | None = None

    @property
    def as_reference(self) -> LayerCase:
        return self.with_(owner_map="auto", sequence_parallel=False, late_stride=False)

    @property
    def control(self) -> LayerCase:
        return self.with_(mode=False, owner_map="auto", late_stride=False)  # neither affects the stock path

    @property
    def allowed(self) -> float:
        # a bias that is added outside rounds a second time; with few elements, one or two decide the error
        few = math.prod(self.tokens) * min(self.in_features, self.out_features) < 2**12
        return 3.0 if few or self.return_bias else super().allowed

    def full_data(self) -> dict[str, Tensor]:
        """The full layer's parameters, and inputs and output gradients for each micro-batch, on the CPU."""
        g, n, k, dtype = self.generator(), self.out_features, self.in_features, self.dtype
        data = {"weight": wide(n, k, generator=g, dtype=dtype)}
        if self.bias:
            data["bias"] = wide(n, generator=g, dtype=dtype)
        if self.norm:
            data["layer_norm_weight"] = wide(k, generator=g, dtype=dtype)
            if self.norm == "LayerNorm":
                data["layer_norm_bias"] = wide(k, generator=g, dtype=dtype)
        for step in range(self.micro_batches):
            data[f"x{step}"] = wide(*self.tokens, k, generator=g, dtype=dtype)
            data[f"dy{step}"] = wide(*self.tokens, n, generator=g, dtype=dtype)
            if self.return_norm:
                data[f"dn{step}"] = wide(*self.tokens, k, generator=g, dtype=dtype)
        return data

    def build(self, tp_group: Any) -> Linear:
        options: dict[str, Any] = dict(
            bias=self.bias,
            parallel_mode=self.parallel_mode,
            tp_group=tp_group,
            sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim,
            partition_stride=self.stride if isinstance(self.stride, int) and not self.late_stride else 1,
            partition_sizes=None if isinstance(self.stride, int) else self.stride,
            gather_output=self.gather_output,
            input_is_parallel=self.input_is_parallel,
            return_bias=self.return_bias,
            gemm_fn=self.gemm_fn,
            owner_map=self.owner_map,
            device=self.device,
            dtype=self.dtype,
        )
        if self.norm:
            layer: Linear = LayerNormLinear(
                self.in_features,
                self.out_features,
                normalization=self.norm,
                zero_centered_gamma=self.zero_centered,
                return_layernorm_output=self.return_norm,
                return_layernorm_output_gathered=self.return_norm_gathered,
                **options,
            )
        else:
            layer = Linear(self.in_features, self.out_features, **options)
        if self.late_stride:
            layer.weight.partition_stride = self.stride  # type: ignore[attr-defined]
        return layer

    def run(self, tp_group: Any) -> Results:
        group = resolve_group(tp_group)
        data = {name: tensor.to(self.device) for name, tensor in self.full_data().items()}
        # dim and stride of what each rank has a part of
        none, features, tokens = (
            (None, 1),
            (-1, self.stride),
            (self.sequence_dim if self.sequence_parallel else None, 1),
        )
        of_x = tokens if self.parallel_mode != "row" else features if self.input_is_parallel else none
        of_y = tokens if self.parallel_mode != "column" else none if self.gather_output else features
        of_norm = none if self.return_norm_gathered else tokens
        results: Results = {}
        with set_tp_invariant_mode(self.mode):
            layer = self.build(tp_group)
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    parameter.copy_(layer.shard_spec(name).local(data[name]))
            for step in range(self.micro_batches):
                x = part(data[f"x{step}"], of_x[0], group, of_x[1])
                out = layer(x)
                returned = list(out) if isinstance(out, tuple) else [out]
                outputs, grads = [returned.pop(0)], [part(data[f"dy{step}"], of_y[0], group, of_y[1])]
                if self.return_bias and (bias := returned.pop(0)) is not None:
                    outputs[0] = outputs[0] + bias
                if self.return_norm:
                    outputs.append(returned.pop(0))
                    grads.append(part(data[f"dn{step}"], of_norm[0], group))
                    results[f"normed{step}"] = whole(outputs[1], of_norm[0], group)
                torch.autograd.backward(outputs, grads)
                results[f"y{step}"] = whole(outputs[0], of_y[0], group, of_y[1])
                results[f"dx{step}"] = whole(grad_of(x), of_x[0], group, of_x[1])
        return results | {f"d_{name}": grad for name, grad in full_grads(layer).items()}

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        data = {name: t.to(self.device, dtype) for name, t in self.full_data().items()}
        params = {name: t.requires_grad_() for name, t in data.items() if name[-1].isalpha()}
        results: dict[str, Tensor] = {}
        for step in range(self.micro_batches):
            x = data[f"x{step}"].requires_grad_()
            normed = x
            if self.norm:
                gamma = params["layer_norm_weight"] + 1 if self.zero_centered else params["layer_norm_weight"]
                if self.norm == "RMSNorm":
                    normed = F.rms_norm(x, (self.in_features,), gamma, 1e-5)
                else:
                    normed = F.layer_norm(x, (self.in_features,), gamma, params["layer_norm_bias"], 1e-5)
            y = F.linear(normed, params["weight"], params.get("bias"))
            outputs, grads = [y], [data[f"dy{step}"]]
            if self.return_norm:
                outputs, grads = [y, normed], [data[f"dy{step}"], data[f"dn{step}"]]
                results[f"normed{step}"] = normed.detach()
            torch.autograd.backward(outputs, grads)
            results[f"y{step}"], results[f"dx{step}"] = y.detach(), grad_of(x)
        return results | {f"d_{name}": grad_of(parameter) for name, parameter in params.items()}
