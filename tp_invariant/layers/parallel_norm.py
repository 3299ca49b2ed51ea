"""ParallelNorm: LayerNorm or RMSNorm for tensor-parallel models, and the conversion of other libraries' norms."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.call_records import call_context
from ..comm.collectives import Group, resolve_group
from ..consistency.agreement import AgreedCalls
from ..consistency.shards import Part, part_of_tokens
from ..core.compiled import specialize
from ..core.dtensors import as_local, refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.layout import TokenSharding, check_divides
from ..core.mode import is_tp_invariant_mode_enabled, mode_if_cacheable
from ..core.module_hooks import settings_of
from ..core.options import Normalization
from ..functional.norm import NORMALIZATIONS, NormCall, invariant_add_norm, invariant_norm, stock_norm
from ..gemm.gemm_fn import check_norm_dtype
from .call_signature import CallSignature, check_first_use
from .parameters import ShardedModule, ShardSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class ParallelNorm(ShardedModule):
    """LayerNorm or RMSNorm over the last dim; with the mode on, the same bits at every degree.

    x [.., features] -> the same shape and dtype; computed in fp32 and rounded once. `weight` and `bias` [features] are
    replicated on every rank, and their gradients are complete when backward returns. How x is sharded:

        not at all                          every rank computes the same
        tokens, with sequence_parallel      along sequence_dim
        heads, with heads and heads_dim     for Qwen3's q_norm: x [B, S, heads/P, features], heads_dim 2

    The weight's gradient of a norm over heads is a sum over heads that are on different ranks. Each head gives one
    partial sum; the partial sums are gathered, and every rank adds them in head order.

    Args:
        features: the size of the last dim.
        eps: added to the variance (RMSNorm: to the mean of squares); None: torch.finfo(x.dtype).eps, as in nn.RMSNorm.
        normalization: "LayerNorm" or "RMSNorm".
        bias: whether to add one.
        zero_centered_gamma: weight is stored minus one (Gemma's RMSNorm).
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1.
        sequence_parallel, sequence_dim: whether, and along which dim of x, the tokens are sharded.
        heads: the number of heads on all ranks together; heads_dim: the dim of x that holds this rank's heads.

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
            raise ValueError("sequence_parallel=True and heads=.. exclude each other: tokens or heads are sharded")
        self.group = resolve_group(tp_group)
        if heads is not None:
            check_divides(heads, self.group.size, size_name="heads", parts_name="TP degree")
        self.features, self.eps, self.normalization = features, eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.heads, self.heads_dim = heads, heads_dim
        self._agreed = AgreedCalls(self.group)
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_norm(
        cls, norm: nn.Module, *, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, **options: Any
    ) -> ParallelNorm:
        """A ParallelNorm with the parameters of `norm`: nn.LayerNorm, nn.RMSNorm, or a module that computes the same.

        Llama's RMSNorm rounds to x's dtype before it multiplies by the weight, this module afterwards: in 16-bit dtypes
        the two differ in the last bit.

        Raises:
            ValueError: `recognise_norm` does not recognise `norm`.
        """
        return cls._on_meta(norm, tp_group=tp_group, **options)._with_parts_of(norm)

    @classmethod
    def _on_meta(cls, norm: nn.Module, **options: Any) -> Self:
        """What `from_norm` makes of `norm`, without values: on the meta device."""
        found = recognise_norm(norm)
        if found is None:
            raise ValueError(
                f"{type(norm).__name__} computes no LayerNorm or RMSNorm over its last dim with weight [features], "
                "also not one with 1 + weight: build a ParallelNorm yourself"
            )
        weight, has_bias = norm.get_parameter("weight"), getattr(norm, "bias", None) is not None
        return cls(weight.numel(), bias=has_bias, device="meta", dtype=weight.dtype, **found, **options)

    def shard_spec(self, name: str) -> ShardSpec:
        return ShardSpec(self.group, None, 1)

    def reset_parameters(self) -> None:
        """weight one (zero when zero-centered), bias zero."""
        if self._reset_as_before():
            return
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x as in the class's table -> y; with a residual like x -> (y, s): s = x + residual, its norm y.

        With a residual the addition and the norm are one launch on a GPU, with the bits of the two after one another:

            h, residual = self.norm(self.attention(h), residual)

        Raises:
            ValueError: a last dim that is not `features`, a heads_dim that does not hold this rank's heads, or a
                residual of another shape, dtype or device than x's, or of a norm over heads.
            TypeError: a dtype that the kernels do not take.
        """
        with inside_a_layer():
            return self._forward(x, residual)

    def _forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        refuse_dtensor(x, "x of a ParallelNorm")
        if residual is not None:
            refuse_dtensor(residual, "residual of a ParallelNorm")
            self._check_residual(x, residual)
        own = self._parameters  # nn.Module.__getattr__ is slow
        weight = own.get("weight")
        if weight is None:  # computed by a parametrization
            weight = self.weight
        bias = self.bias
        for name, p in (("weight", weight), ("bias", bias)):
            if p is not None and getattr(p, "partition_stride", None) is None:  # of torch.func.functional_call
                self._mark_replacement(name, p, self.shard_spec(name))
        call, invariant = self._resolve_call(x, weight, bias)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            call_context.layer = self._agreed
        try:
            s = None
            if not invariant:
                s = x if residual is None else x + residual
                y = stock_norm(s, as_local(weight), as_local(bias), call)
            elif residual is None:
                y = invariant_norm(x, weight, bias, call)
            else:
                y, s = invariant_add_norm(x, residual, weight, bias, call)
        finally:
            if not compiling:
                call_context.layer = None
        return y if residual is None else (y, s)

    def _check_residual(self, x: Tensor, residual: Tensor) -> None:
        if self.heads is not None:
            raise ValueError(f"a residual was given to a norm over heads={self.heads}: add it before")
        if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}, and residual is {residual.dtype} "
                f"{tuple(residual.shape)} on {residual.device}: they must have one shape, dtype and device"
            )

    @property
    def _moves_bytes(self) -> bool:
        return self.group.size > 1 and (self.sequence_parallel or self.heads is not None)

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _resolve_call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[NormCall, bool]:
        """(the call's configuration, whether the mode is on), after the checks on this rank and across ranks.

        The result is stored by call signature, so the checks run once for each signature.
        """
        mode = mode_if_cacheable()
        signature = None if mode is None else self._signature(mode, x, weight, bias)
        known = self._agreed.lookup(signature)
        if known is not None and known[0].group is self.group:
            return known
        invariant = check_first_use(
            self, x, lambda: self._check_call(x), lambda invariant: self._signature(invariant, x, weight, bias),
            ("whether the bias needs a gradient",), weight=self._parameters.get("weight"), part=self._part(x),
        )  # fmt: skip
        call = NormCall(
            self.group,
            TokenSharding(self.group.size if self.sequence_parallel else 1, self.sequence_dim),
            torch.finfo(x.dtype).eps if self.eps is None else self.eps,
            self.normalization == "RMSNorm",
            self.zero_centered_gamma,
            self.heads_dim,
        )
        return self._agreed.store(signature, (call, invariant))

    def _part(self, x: Tensor) -> Part | None:
        """x, if each rank must pass another part of it."""
        name = f"x of {self._name}"
        if self.heads_dim is None:
            return part_of_tokens(name, x, self.sequence_dim) if self.sequence_parallel else None
        advice = "Pass this rank's heads, as a column-parallel layer returns them, or leave out heads"
        return Part(name, x, (self.heads_dim,), advice)

    def _check_call(self, x: Tensor) -> bool:
        """Whether the mode is on, after the checks of this rank."""
        self._check_input(x)
        invariant = is_tp_invariant_mode_enabled()
        if invariant:
            check_norm_dtype(x, f"x on rank {self.group.rank}")
        return invariant

    def _signature(self, invariant: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> CallSignature:
        layer = (
            self.features, self.eps, self.normalization, self.zero_centered_gamma,
            self.sequence_parallel, self.sequence_dim, self.heads, self.heads_dim,
        )  # fmt: skip
        return CallSignature(
            invariant, layer, (bias is not None and bias.requires_grad,), x.shape, x.dtype, x.device, x.requires_grad,
            weight.shape, weight.dtype, weight.requires_grad, torch.is_grad_enabled(),
        )  # fmt: skip

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
        text = f"{self.features}, eps={specialize(self.eps)}, normalization={self.normalization!r}"
        if self.zero_centered_gamma:
            text += ", zero_centered_gamma=True"
        if self.heads is not None:
            text += f", heads={self.heads}, heads_dim={self.heads_dim}"
        return text + (f", sequence_parallel=True, sequence_dim={self.sequence_dim}" if self.sequence_parallel else "")


# --- other libraries' norms -----------------------------------------------------------------------------------------


def recognise_norm(norm: nn.Module) -> dict[str, Any] | None:
    """The ParallelNorm options (eps, normalization, zero_centered_gamma) that compute what `norm` does, else None.

    Found by running it, because every Hugging Face model has its own norm class: a float64 copy with random weights
    gets random rows, in training and in evaluation: some so small that a wrong eps changes the result visibly, and some
    so large that a clamp does. They have two dims before the last one, because a norm over all dims but the first, or
    over dim 1, is one over the last dim where there are two. A norm that counts its calls is not recognised.
    """
    settings = settings_of(norm) if any(name in vars(norm) for name in _EPS) else None
    if settings is None:
        return _try_norm(norm)
    if settings not in _recognised:
        _recognised[settings] = _try_norm(norm)
    return None if (found := _recognised[settings]) is None else {**found}


_EPS = "variance_epsilon", "eps"


_recognised: dict[Any, dict[str, Any] | None] = {}  # by what decides it: the norms of a model are mostly alike


def _try_norm(norm: nn.Module) -> dict[str, Any] | None:
    shapes = {name: tuple(p.shape) for name, p in norm.named_parameters()}
    if "weight" not in shapes or len(shapes["weight"]) != 1:
        return None
    if (
        isinstance(norm, nn.RMSNorm)
        and norm.eps is None
        and getattr(norm.forward, "__func__", None) is nn.RMSNorm.forward
    ):
        return dict(eps=None, normalization="RMSNorm", zero_centered_gamma=False)
    eps = next((e for name in _EPS if isinstance(e := getattr(norm, name, None), float)), None)
    if eps is None:
        return None
    generator = torch.Generator().manual_seed(0)
    size = shapes["weight"][0]
    twin = copy.deepcopy(norm).to_empty(device="cpu").to(torch.float64).requires_grad_(False)
    arguments = inspect.signature(norm.forward).parameters.values()
    if sum(argument.kind is argument.POSITIONAL_OR_KEYWORD for argument in arguments) > 1:
        return None  # a gate, say, which it may do without
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    x = draw(4, 3, size) * max(eps, 1e-12) ** 0.5 + eps**0.5
    x[2:] *= 100 / max(eps, 1e-12) ** 0.5
    for name in shapes:
        # also of a user's own, which a norm that is recognised does not use
        twin.get_parameter(name).copy_(draw(shapes[name]))
    before = [(name, value) for name, value in vars(twin).items() if isinstance(value, (int, float))]
    try:
        ys = [twin.train(training)(x) for training in (True, False)]
    except Exception:  # it needs other arguments (a gate, say): foreign code may raise any exception
        return None
    twin.train(norm.training)
    if any(not isinstance(y, Tensor) or y.shape != x.shape for y in ys) or any(vars(twin)[n] != v for n, v in before):
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
            if all(torch.allclose(y.double(), expected, rtol=1e-3, atol=1e-4) for y in ys):  # they compute in fp32
                return dict(eps=eps, normalization=normalization, zero_centered_gamma=zero_centered)
    return None
