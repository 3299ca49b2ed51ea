"""ParallelNorm: a LayerNorm or RMSNorm beside tensor-parallel layers, and the way to one from another library's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.call_records import doing
from ..comm.collectives import Group, resolve_group
from ..consistency.agreement import Agreed, check_agreement, check_gradient, refuse
from ..core.compiled import plain
from ..core.dtensors import as_local
from ..core.layout import TokenSharding, check_divides
from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled
from ..core.options import Normalization
from ..functional.norm import NORMALIZATIONS, NormCall, invariant_norm, stock_norm
from ..gemm.gemm_fn import check_norm_dtype
from .call_signature import CallSignature, facts_of, mode_of_known_calls, signature_of
from .parameters import ShardedModule, ShardSpec
from .ties import refuse_ties


class ParallelNorm(ShardedModule):
    """LayerNorm or RMSNorm over the last dim; with the mode on, the same bits at every degree.

    x [.., features] -> the same shape and dtype; computed in fp32 and rounded once. `weight` and `bias` [features] are
    whole on every rank and so are their gradients when backward returns. What of x is this rank's part:

        nothing                             every rank computes the same
        tokens, with sequence_parallel      along sequence_dim
        heads, with heads and heads_dim     for Qwen3's q_norm: x [B, S, heads/P, features], heads_dim 2

    The gradient of a norm over heads is a sum over heads that live on different ranks: each head's sum is a leaf, the
    leaves are gathered and folded in head order.

    Args:
        features: the size of the last dim.
        eps: added to the variance (RMSNorm: to the mean of squares); None takes x's dtype's, as nn.RMSNorm does.
        normalization: "LayerNorm" or "RMSNorm".
        bias: whether to add one.
        zero_centered_gamma: weight is stored minus one (Gemma's RMSNorm).
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1.
        sequence_parallel, sequence_dim: whether, and along which dim of x, the tokens are sharded.
        heads: how many heads all ranks have; heads_dim: the dim of x that holds this rank's.

    Raises:
        ValueError: an unknown normalization, heads that the degree does not divide, tokens and heads both sharded.
    """

    SHARDED_PARAMETERS: tuple[str, ...] = ("weight", "bias")

    def __init__(
        self,
        features: int,
        eps: float | None = 1e-6,
        *,
        normalization: Normalization = "RMSNorm",
        bias: bool = False,
        zero_centered_gamma: bool = False,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        heads: int | None = None,
        heads_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization={normalization!r} is unknown: choose one of {NORMALIZATIONS}")
        if (heads is None) != (heads_dim is None):
            raise ValueError(f"heads={heads} and heads_dim={heads_dim} go together: give both or neither")
        if heads is not None and sequence_parallel:
            raise ValueError("sequence_parallel=True and heads=.. exclude each other: x has either's part, not both")
        self.group = resolve_group(tp_group)
        if heads is not None:
            check_divides(heads, self.group.size, size_name="heads", parts_name="TP degree")
        self.features, self.eps, self.normalization = features, eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.heads, self.heads_dim = heads, heads_dim
        self._agreed = Agreed(self.group)
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_norm(
        cls, norm: nn.Module, *, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, **options: Any
    ) -> ParallelNorm:
        """One with the parameters of `norm`: an nn.LayerNorm, nn.RMSNorm, or any module that computes the same.

        Llama's kind of RMSNorm rounds to x's dtype before it multiplies with the weight, and this one after: in 16 bit
        they differ in the last place.

        Raises:
            ValueError: `norm` is none of those that `recognise_norm` knows, or another module holds its parameters too.
        """
        refuse_ties(norm)
        found = recognise_norm(norm)
        if found is None:
            raise ValueError(
                f"{type(norm).__name__} computes no LayerNorm or RMSNorm over its last dim with weight [features], "
                "also not one with 1 + weight: build a ParallelNorm yourself"
            )
        weight, bias = norm.get_parameter("weight"), getattr(norm, "bias", None)
        layer = cls(weight.numel(), bias=bias is not None, tp_group=tp_group, device="meta", **found, **options)
        for name, parameter in (("weight", weight), ("bias", bias)):
            if parameter is not None:
                setattr(layer, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        return layer.train(norm.training)

    def shard_spec(self, name: str) -> ShardSpec:
        return ShardSpec(self.group, None, 1)

    def reset_parameters(self) -> None:
        """weight one (zero when zero-centered), bias zero."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x as in the class's table -> y.

        Raises:
            ValueError: a last dim that is not `features`, or a heads_dim that does not hold this rank's heads.
            TypeError: a dtype that the kernels do not take.
        """
        weight = self.weight  # once: nn.Module looks for parameters last
        call, invariant = self._settle(x, weight)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            doing.layer = self._agreed
        try:
            if invariant:
                y = invariant_norm(x, weight, self.bias, call)
            else:
                y = stock_norm(x, as_local(weight), as_local(self.bias), call)
        finally:
            if not compiling:
                doing.layer = None
        if self._moves_bytes and is_call_check_enabled():
            y = check_gradient(y, self._name, self.group, self._agreed)
        return y

    @property
    def _moves_bytes(self) -> bool:
        return self.group.size > 1 and (self.sequence_parallel or self.heads is not None)

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _settle(self, x: Tensor, weight: Tensor) -> tuple[NormCall, bool]:
        """How this call goes, and whether the mode is on: checked here and over the ranks, once for a kind of call."""
        group = self.group
        mode = mode_of_known_calls()
        signature = None if mode is None else self._signature(mode, x, weight)
        found = self._agreed.found(signature)
        if found is not None and found[0].group is group:
            return found
        try:
            self._check_input(x)
            invariant = is_tp_invariant_mode_enabled()
            if invariant:
                check_norm_dtype(x, f"x on rank {group.rank}")
        except (TypeError, ValueError) as error:
            if self._moves_bytes:
                refuse(error, group, x.device, self._agreed)
            raise
        if self._moves_bytes:
            told = self._signature(invariant, x, weight) if signature is None else signature
            check_agreement(facts_of(told, self._name), group, x.device, self._agreed)
        call = NormCall(
            group,
            TokenSharding(group.size if self.sequence_parallel else 1, self.sequence_dim),
            torch.finfo(x.dtype).eps if self.eps is None else self.eps,
            self.normalization == "RMSNorm",
            self.zero_centered_gamma,
            self.heads_dim,
        )
        return self._agreed.settle(signature, (call, invariant))

    def _signature(self, invariant: bool, x: Tensor, weight: Tensor) -> CallSignature:
        layer = (
            self.features, self.eps, self.normalization, self.zero_centered_gamma,
            self.sequence_parallel, self.sequence_dim, self.heads, self.heads_dim,
        )  # fmt: skip
        return signature_of(invariant, layer, (), x, weight)

    def _check_input(self, x: Tensor) -> None:
        where = f"x has shape {tuple(x.shape)} on rank {self.group.rank}"
        if x.shape[-1] != self.features:
            raise ValueError(f"{where}: its last dim must be features={self.features}")
        if self.heads is not None and self.heads_dim is not None:
            local = self.heads // self.group.size
            if not 0 <= self.heads_dim < x.dim() - 1 or x.shape[self.heads_dim] != local:
                raise ValueError(
                    f"{where}: its dim {self.heads_dim} (heads_dim) must hold {local} heads, this rank's of "
                    f"heads={self.heads} at TP degree {self.group.size}"
                )

    def extra_repr(self) -> str:
        text = f"{self.features}, eps={plain(self.eps)}, normalization={self.normalization!r}"
        if self.zero_centered_gamma:
            text += ", zero_centered_gamma=True"
        if self.heads is not None:
            text += f", heads={self.heads}, heads_dim={self.heads_dim}"
        return text + (f", sequence_parallel=True, sequence_dim={self.sequence_dim}" if self.sequence_parallel else "")


# --- other libraries' norms -----------------------------------------------------------------------------------------


def recognise_norm(norm: nn.Module) -> dict[str, Any] | None:
    """The ParallelNorm options (eps, normalization, zero_centered_gamma) that compute what `norm` does, else None.

    By trying: every model of Hugging Face's has a norm class of its own, most of them alike, some not. A float64 copy
    with random weights gets random rows, so small that a wrong eps shows too.
    """
    shapes = {name: tuple(p.shape) for name, p in norm.named_parameters()}
    if "weight" not in shapes or len(shapes["weight"]) != 1 or set(shapes) - {"weight", "bias"}:
        return None
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and norm.eps is None:
        return dict(eps=None, normalization="RMSNorm", zero_centered_gamma=False)
    eps = next((e for name in ("variance_epsilon", "eps") if isinstance(e := getattr(norm, name, None), float)), None)
    if eps is None:
        return None
    generator = torch.Generator().manual_seed(0)
    size = shapes["weight"][0]
    twin = copy.deepcopy(norm).to_empty(device="cpu").to(torch.float64).requires_grad_(False)
    x = torch.randn(4, size, generator=generator, dtype=torch.float64) * max(eps, 1e-12) ** 0.5 + eps**0.5
    for name in shapes:
        twin.get_parameter(name).copy_(torch.randn(size, generator=generator, dtype=torch.float64))
    try:
        y = twin(x)
    except Exception:  # wants other arguments (a gate, say), or is no function of x alone: it may raise anything
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    gamma, bias = twin.get_parameter("weight"), twin.get_parameter("bias") if "bias" in shapes else None
    for normalization in NORMALIZATIONS:
        for zero_centered in (False, True):
            weight = gamma + 1 if zero_centered else gamma
            if normalization == "LayerNorm":
                expected = F.layer_norm(x, (size,), weight, bias, eps)
            else:
                expected = F.rms_norm(x, (size,), weight, eps)
                expected = expected if bias is None else expected + bias
            if torch.allclose(y.double(), expected, rtol=1e-3, atol=1e-4):  # they compute in fp32
                return dict(eps=eps, normalization=normalization, zero_centered_gamma=zero_centered)
    return None
