"""LayerNormLinear: a norm and the column-parallel (or whole) linear layer after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.dtensors import as_local
from ..core.layout import Stride, TokenSharding
from ..core.options import Normalization, ParallelMode
from ..functional.norm import NORMALIZATIONS, NormCall, invariant_norm, stock_norm
from ..functional.regions import gather_sequence
from .linear import Linear
from .parameters import ShardSpec


class LayerNormLinear(Linear):
    """y = norm(x) Wᵀ + b with LayerNorm or RMSNorm; with the mode on, the same bits at every degree.

    The norm acts on this rank's tokens. `layer_norm_weight` [in_features] and `layer_norm_bias` [in_features] (not for
    RMSNorm) are replicated on every rank, and their gradients are complete when backward returns. Shapes and the other
    options are Linear's.

    Args:
        eps: added to the variance (RMSNorm: to the mean of squares).
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: layer_norm_weight is stored minus one.
        return_layernorm_output: also return the norm's output, last in the tuple.
        return_layernorm_output_gathered: return it for all tokens (under sequence parallelism; else no difference).
            Its gradient is taken to be complete on every rank, as everywhere in this library.

    Raises:
        ValueError: parallel_mode="row" (the norm needs whole rows) or an unknown normalization; else as Linear.
    """

    SHARDED_PARAMETERS: tuple[str, ...] = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
    _OPTIONS = (
        *Linear._OPTIONS, "the norm", "which parameters of the norm need a gradient", "return_layernorm_output",
    )  # fmt: skip

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parallel_mode: ParallelMode | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization={normalization!r} is unknown: choose 'LayerNorm' or 'RMSNorm'")
        if parallel_mode == "row":
            raise ValueError(
                "parallel_mode='row' is impossible for LayerNormLinear (a norm needs whole rows): use 'column' or None"
            )
        if in_features < 1:
            raise ValueError(f"in_features={in_features} must be at least 1 for a norm")
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
            raise ValueError(f"eps={eps!r} must be a number of at least 0 (the third argument is eps, not bias)")
        if return_layernorm_output_gathered and not return_layernorm_output:
            raise ValueError("return_layernorm_output_gathered=True needs return_layernorm_output=True")
        super().__init__(
            in_features, out_features, bias, parallel_mode=parallel_mode, device=device, dtype=dtype, **options
        )
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        if normalization == "LayerNorm":
            self.layer_norm_bias: nn.Parameter | None = nn.Parameter(
                torch.empty(in_features, device=device, dtype=dtype)
            )
        else:
            self.register_parameter("layer_norm_bias", None)
        self.reset_layer_norm_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LayerNormLinear:
        """Shards a full nn.Linear; the norm starts as the identity (copy your values into layer_norm_weight)."""
        layer = super().from_linear(linear, **options)
        assert isinstance(layer, LayerNormLinear)
        device = linear.weight.device
        for name in ("layer_norm_weight", "layer_norm_bias"):
            parameter = getattr(layer, name)
            if parameter is not None:
                setattr(layer, name, nn.Parameter(torch.empty_like(parameter, device=device)))
        layer.reset_layer_norm_parameters()
        return layer

    def shard_spec(self, name: str) -> ShardSpec:
        return ShardSpec(self.group, None, 1) if name.startswith("layer_norm_") else super().shard_spec(name)

    def reset_parameters(self) -> None:
        """Linear's, and the norm back to the identity."""
        super().reset_parameters()
        if hasattr(self, "layer_norm_weight"):  # nn.Linear's parameters are made first
            self.reset_layer_norm_parameters()

    def reset_layer_norm_parameters(self) -> None:
        """gamma one (zero when zero-centered), beta zero."""
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _options(self, x: Tensor, bias: Tensor | None, stride: Stride) -> tuple[Any, ...]:
        own = self._parameters
        gamma, beta = own.get("layer_norm_weight"), own.get("layer_norm_bias")
        # of each: the partial sums that backward gathers are gamma's, and beta's beside them if both are trained
        trained = gamma is None or gamma.requires_grad, beta is None or beta.requires_grad
        norm = self.normalization, self.eps, self.zero_centered_gamma
        returned = self.return_layernorm_output, self.return_layernorm_output_gathered
        return *super()._options(x, bias, stride), norm, trained, returned

    def forward(self, input: Tensor) -> Any:
        """input [.., in_features], this rank's tokens under SP -> y, or a tuple `(y[, bias][, norm's output])`."""
        return super().forward(input)

    def _norm_call(self) -> NormCall:
        world = self.group.size if self.sequence_parallel else 1
        sharding = TokenSharding(world, self.sequence_dim)
        return NormCall(self.group, sharding, self.eps, self.normalization == "RMSNorm", self.zero_centered_gamma)

    def _normalized(self, x: Tensor, norm: NormCall, invariant: bool) -> Tensor:
        own = self._parameters
        gamma, beta = own.get("layer_norm_weight"), own.get("layer_norm_bias")
        if gamma is None or (beta is None and not norm.rms):  # computed by a parametrization
            gamma, beta = self.layer_norm_weight, self.layer_norm_bias
        for name, p in (("layer_norm_weight", gamma), ("layer_norm_bias", beta)):
            if p is not None and getattr(p, "partition_stride", None) is None:  # of torch.func.functional_call
                self._mark_replacement(name, p, self.shard_spec(name))
        if invariant:
            return invariant_norm(x, gamma, beta, norm)
        return stock_norm(x, as_local(gamma), as_local(beta), norm)

    def _with_normalized(self, result: Any, normed: Tensor) -> Any:
        if not self.return_layernorm_output:
            return result
        if self.sequence_parallel and self.group.size > 1 and self.return_layernorm_output_gathered:
            normed = gather_sequence(normed, self.group, self.sequence_dim)
        return (*result, normed) if isinstance(result, tuple) else (result, normed)
