"""Linear: an nn.Linear that is column-parallel, row-parallel or whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.call_records import call_context
from ..comm.collectives import Group, resolve_group
from ..consistency.agreement import AgreedCalls
from ..consistency.shards import Part, part_of_tokens
from ..core.autocast import autocast_dtype
from ..core.compiled import callable_id, constant
from ..core.dtensors import as_local, is_dtensor, local_of, refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.layout import Stride, check_divides, check_sequence
from ..core.mode import is_tp_invariant_mode_enabled, mode_if_cacheable
from ..core.options import OwnerMap, ParallelMode
from ..functional import linear as functions
from ..functional import stock
from ..functional.linear import LinearCall
from ..functional.main_grad import MainGrad
from ..functional.norm import NormCall
from ..functional.regions import gather_features, scatter_features
from ..gemm.cost_model import costs_of
from ..gemm.gemm_fn import BUNDLED_DTYPES, GemmFn, check_dtype, check_norm_dtype, check_signature, gemm_fn_name
from ..gemm.owner_maps import ShardedWeight, check_owner_map
from ..gemm.slice_check import check_first_product
from ..gemm.weights import weight_cache
from .call_signature import CallSignature, check_first_use
from .parameters import ShardedModule, ShardSpec, full_initialisation

if TYPE_CHECKING:
    from typing_extensions import Self

_COMPUTED: Any = object()  # in place of a parameter that a parametrization has replaced
# how the nodes of this library's functions end that put out a whole activation, or a part of their own making
_NODES_OF_LAYERS = (
    "LinearBackward", "BiasBackward", "EmbeddingBackward", "SequenceBackward", "FeaturesBackward", "HeadsBackward",
    "CombineBackward",
)  # fmt: skip
PARALLEL_MODES = (None, *get_args(ParallelMode))

_INVARIANT: dict[str | None, Callable[..., Tensor]] = {
    None: functions.replicated_linear,
    "column": functions.column_linear,
    "row": functions.row_linear,
}
_INTO_MAIN_GRAD: dict[str | None, Callable[..., Tensor]] = {
    None: functions.replicated_linear_into_main_grad,
    "column": functions.column_linear_into_main_grad,
    "row": functions.row_linear_into_main_grad,
}
_STOCK: dict[str | None, Callable[..., Tensor]] = {
    None: stock.replicated_linear,
    "column": stock.column_linear,
    "row": stock.row_linear,
}


class Linear(ShardedModule, nn.Linear):
    """y = x Wᵀ + b over tensor-parallel ranks; with the mode on, the same bits at every degree.

    Shapes, for P ranks (SP: sequence_parallel, `sequence_dim` divided by P; `..` are any number of token dims):

        parallel_mode   weight       bias     x                                   y
        None            [N, K]       [N]      [.., K]                             [.., N]
        "column"        [N/P, K]     [N/P]    [.., K]; SP: this rank's tokens     [.., N/P], all tokens
        "row"           [N, K/P]     [N]      [.., K/P], all tokens               [.., N]; SP: this rank's tokens

    When backward returns, the gradient of every replicated parameter is complete on every rank: nothing is left to
    reduce over the tensor-parallel group (leave Megatron's `sequence_parallel` attribute on parameters False).

    Args:
        in_features, out_features: K and N of the full layer.
        bias: whether to add one.
        parallel_mode: None, "column" (N is sharded) or "row" (K is sharded).
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1.
        sequence_parallel: whether activations outside the parallel region are sharded along `sequence_dim`.
        sequence_dim: the dim of x that sequence parallelism shards, counted from the front.
        partition_stride: the number of stacked pieces in this rank's part of the sharded dim; 2 for gated FC1
            ([gate_r; up_r]). Stored as `weight.partition_stride` and read from there at every call, because Megatron
            sets it after construction. After such a change call `reset_parameters()` (or load a checkpoint) to get
            the values that other degrees have.
        partition_sizes: the full sizes of these pieces where the pieces differ in size: (4096, 1024, 1024) for a fused
            [q; k; v] with fewer heads of k and v, of which a rank holds [q_r; k_r; v_r]. Equal sizes are converted to
            partition_stride.
        gather_output: column-parallel only: return [.., N], whole on every rank.
        input_is_parallel: row-parallel only: False for an x [.., K] that is whole on every rank.
        return_bias: return (y, bias) without adding the bias. The bias is expanded to y's shape (a stride-0 view), so
            that this library determines the order in which its gradient is summed over tokens.
        fuse_wgrad_accumulation: add the weight's gradient, in fp32, to `weight.main_grad`, which must exist before
            forward, and do not set `.grad`; see functional/main_grad.py.
        init_method: called with the full weight [N, K]; nn.Linear's initialisation if None.
        gemm_fn: see gemm/gemm_fn.py; None takes the process-wide default, else the bundled one for the device.
        owner_map: "auto", "replicate", "rows" or "cols", see gemm/owner_maps.py; it changes the speed, never the bits.
        device, dtype: as for nn.Linear; "meta" works, followed by `to_empty()` and `reset_parameters()`.

    Dtypes: bfloat16, float16 or float32, x and weight alike; accumulation in fp32. Under torch.autocast the autocast
    dtype wins. weight and bias gradients have their parameters' dtypes.

    Raises:
        ValueError: an unknown option, or sizes that the degree (times partition_stride) does not divide, or
            partition_sizes that do not add up to the sharded dim.
        TypeError: dtypes that differ, tp_group or gemm_fn of the wrong kind.
    """

    masks_are_whole = False  # a user's word: dropout of x, a part, is this rank's part of a mask that all ranks draw
    SHARDED_PARAMETERS: tuple[str, ...] = ("weight", "bias")
    _OPTIONS: tuple[str, ...] = (  # their names in error messages, in the order of `_options`
        "bias", "partition_stride", "sequence_parallel", "sequence_dim", "owner_map", "gather_output", "return_bias",
        "fuse_wgrad_accumulation", "what owner_map='auto' goes by", "gemm_fn",
        "weight_cache's ahead, ahead_in_graphs and keep",
    )  # fmt: skip

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parallel_mode: ParallelMode | None = None,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        partition_stride: int = 1,
        partition_sizes: Sequence[int] | None = None,
        gather_output: bool = False,
        input_is_parallel: bool = True,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        gemm_fn: GemmFn | None = None,
        owner_map: OwnerMap = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make full-size parameters
        if parallel_mode not in PARALLEL_MODES:
            raise ValueError(f"parallel_mode={parallel_mode!r} is unknown: choose one of None, 'column', 'row'")
        if gather_output and parallel_mode != "column":
            raise ValueError(f"gather_output=True needs parallel_mode='column', not {parallel_mode!r}")
        if not input_is_parallel and parallel_mode != "row":
            raise ValueError(f"input_is_parallel=False needs parallel_mode='row', not {parallel_mode!r}")
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode = parallel_mode
        self.group = resolve_group(tp_group)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.gather_output, self.input_is_parallel, self.return_bias = gather_output, input_is_parallel, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.init_method = init_method
        self._agreed = AgreedCalls(self.group)
        self.gemm_fn = gemm_fn
        self.owner_map = check_owner_map(owner_map)

        shape = [out_features, in_features]
        self.partition_sizes: tuple[int, ...] | None = None
        if partition_sizes is not None:
            if parallel_mode is None or partition_stride != 1:
                raise ValueError(
                    f"partition_sizes={partition_sizes!r} goes with parallel_mode='column' or 'row' and no "
                    f"partition_stride; got parallel_mode={parallel_mode!r}, partition_stride={partition_stride!r}"
                )
            name, dim = ("out_features", 0) if parallel_mode == "column" else ("in_features", 1)
            stride = check_sizes(partition_sizes, shape[dim], self.group.size, name)
            partition_stride, self.partition_sizes = (stride, None) if isinstance(stride, int) else (1, stride)
        self._stride = _check_stride(partition_stride)
        if parallel_mode is not None:
            name, dim = ("out_features", 0) if parallel_mode == "column" else ("in_features", 1)
            check_divides(shape[dim], self.group.size, size_name=name, stride=partition_stride)
            shape[dim] //= self.group.size
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        parallel_mode: ParallelMode | None,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
        **options: Any,
    ) -> Linear:
        """This rank's part of a full nn.Linear: same values, dtype, device and requires_grad; options as for Linear.

        Every rank must hold the same full `linear`. The parameters are not tied to other modules that hold those of
        `linear`.

        Raises:
            TypeError: `linear` is no nn.Linear.
            ValueError: `linear` is sharded already.
        """
        return cls._on_meta(linear, parallel_mode=parallel_mode, tp_group=tp_group, **options)._with_parts_of(linear)

    @classmethod
    def _on_meta(cls, linear: nn.Linear, **options: Any) -> Self:
        """What `from_linear` makes of `linear`, without values: on the meta device."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}: pass an nn.Linear, whose weight is [out, in]")
        weight = linear.weight
        if tuple(weight.shape) != (linear.out_features, linear.in_features):
            raise ValueError(
                f"linear.weight has shape {tuple(weight.shape)} where its features say "
                f"{(linear.out_features, linear.in_features)}: pass a layer that is not sharded yet"
            )
        options |= dict(bias=linear.bias is not None, device="meta", dtype=weight.dtype)
        return cls(linear.in_features, linear.out_features, **options)

    @property
    def partition_stride(self) -> int:
        """weight.partition_stride as it is now.

        Raises:
            ValueError: it is not a positive integer, or does not divide this rank's part of the sharded dim.
        """
        return self._stride_of(getattr(self, "weight", None))  # None between `del layer.weight` and an assignment

    def _stride_of(self, weight: Tensor | None) -> int:
        stride = getattr(weight, "partition_stride", None)
        if stride is None:  # a replacement for the weight (torch.func.functional_call): use the last known stride
            stride = self._stride
            if weight is not None and not torch.compiler.is_compiling():
                spec, whole = self._spec_with("weight", stride), (self.out_features, self.in_features)
                if spec.dim is not None and self.group.size > 1 and tuple(local_of(weight).shape) == whole:
                    raise ValueError(
                        f"the weight that {self._name} is called with on rank {self.group.rank} has the shape {whole} "
                        f"of the whole weight. Give this rank's part along dim {spec.dim}, or a DTensor of it"
                    )
                self._mark_replacement("weight", weight, spec)
        if self.group.mesh is not None and stride != self._stride:
            raise ValueError(
                f"weight.partition_stride={stride!r} was set on rank {self.group.rank} of a layer that was made with "
                f"partition_stride={self._stride}, and the placements of its parameters, which are DTensors, say that: "
                "give it to the constructor, or tp_group as a ProcessGroup (mesh.get_group())"
            )
        if stride != self._stride or type(stride) is not int:  # nn.Module's assignment is slow
            self._stride = _check_stride(stride)
        if self.parallel_mode is not None and stride > 1 and weight is not None:
            dim = 0 if self.parallel_mode == "column" else 1
            size, size_name = local_of(weight).shape[dim] * self.group.size, ("out_features", "in_features")[dim]
            check_divides(size, self.group.size, size_name=size_name, stride=stride)
        if stride > 1 and self.partition_sizes is not None:
            raise ValueError(f"weight.partition_stride={stride} and partition_sizes={self.partition_sizes}: leave one")
        return stride

    def _pieces(self) -> Stride:
        return self.partition_stride if self.partition_sizes is None else self.partition_sizes

    def shard_spec(self, name: str) -> ShardSpec:
        return self._spec_with(name, self.partition_stride)

    def _spec_with(self, name: str, stride: Stride) -> ShardSpec:
        dims = {None: {}, "column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}[self.parallel_mode]
        return ShardSpec(self.group, dims.get(name), self.partition_sizes or stride)

    def reset_parameters(self) -> None:
        """Draws new values for the full layer, by init_method or as nn.Linear does, and stores this rank's part.

        The values depend on the seed and not on the degree; without init_method they equal nn.Linear's for the same
        seed. Use the same seed on all ranks.
        """
        if self.weight.is_meta or self._reset_as_before():
            return
        with (
            full_initialisation(self.weight, (self.out_features, self.in_features), self.shard_spec("weight")) as full,
            torch.no_grad(),
        ):
            if self.init_method is not None:
                self.init_method(full)
            else:
                nn.init.kaiming_uniform_(full, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            with full_initialisation(self.bias, (self.out_features,), self.shard_spec("bias")) as full:
                nn.init.uniform_(full, -bound, bound)

    def prefetch_weight(self) -> None:
        """Starts gathering the weight for the next forward of a row-parallel layer, which needs the full weight.

        Does nothing where no gather is needed. Every rank must call it.
        """
        if self.parallel_mode != "row" or self.group.size == 1 or not is_tp_invariant_mode_enabled():
            return
        if autocast_dtype(self.weight.device) is not None:  # forward will cast the weight to a new tensor
            return
        weight = ShardedWeight(local_of(self.weight), 1, self._pieces(), self.group)
        weight.prefetch("cols" if self.owner_map == "cols" else "rows")

    @property
    def gemm_fn(self) -> GemmFn | None:
        return self._gemm_fn

    @gemm_fn.setter
    def gemm_fn(self, gemm_fn: GemmFn | None) -> None:
        self._gemm_fn = check_signature(gemm_fn)
        self._agreed.clear()  # the next call is checked as a first one, on all ranks
        self._gemm_fn_name = "none" if gemm_fn is None else callable_id(gemm_fn)

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Any:
        """input, the class's x -> y, or (y, bias expanded to y's shape or None) with return_bias.

        Raises:
            ValueError: a last dim that is not this rank's features, or a sequence that the degree does not divide.
            TypeError: a dtype that is not the weight's, outside autocast.
        """
        with inside_a_layer():
            return self._forward(input)

    def _forward(self, x: Tensor) -> Any:
        if is_dtensor(x):
            refuse_dtensor(x, f"x of {self._name}")
        own = self._parameters  # nn.Module.__getattr__ is slow
        weight: Tensor = own.get("weight")  # type: ignore[assignment]
        if weight is None:  # computed by a parametrization
            weight = self.weight
        bias: Tensor | None = own.get("bias", _COMPUTED)
        if bias is _COMPUTED:
            bias = self.bias
        stride: Stride = self._stride_of(weight)
        if bias is not None and (known := getattr(bias, "partition_stride", None)) != stride:
            if known is None:
                self._mark_replacement("bias", bias, self._spec_with("bias", stride))
            bias.partition_stride = stride  # type: ignore[attr-defined]  # Megatron sets the weight's alone, and late
        stride = self.partition_sizes or stride
        dtype = self._product_dtype(x.device)
        if dtype is not None:
            x, weight = x.to(dtype), as_local(weight).to(dtype)
            bias = None if bias is None else as_local(bias).to(dtype)
        call, invariant, norm = self._resolve_call(x, weight, bias, stride)
        if not invariant:  # else the functions of functional/linear.py take them
            weight, bias = as_local(weight), as_local(bias)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            call_context.layer = self._agreed
        try:
            if norm is not None:
                normed = self._normalized(x, norm, invariant)
                x = normed if dtype is None else normed.to(dtype)  # torch's norm gives float32 under autocast
            if self.parallel_mode == "row" and not self.input_is_parallel:
                x = scatter_features(x, self.group, stride)
            paths = _STOCK if not invariant else _INVARIANT if call.main_grad is None else _INTO_MAIN_GRAD
            linear = paths[self.parallel_mode]
            y = linear(x, weight, None if self.return_bias else bias, call)
            if self.gather_output:
                y = gather_features(y, self.group, stride)
            result = (y, self._expanded_bias(bias, y, call, invariant)) if self.return_bias else y
            return result if norm is None else self._with_normalized(result, normed)
        finally:
            if not compiling:
                call_context.layer = None

    def _product_dtype(self, device: torch.device) -> torch.dtype | None:
        """To which x and the parameters are converted before the product; None: they have its dtype."""
        return autocast_dtype(device)

    def _norm_call(self) -> NormCall | None:
        """The norm of x before the product, which LayerNormLinear has."""
        return None

    def _normalized(self, x: Tensor, norm: NormCall, invariant: bool) -> Tensor:
        """x after that norm."""
        return x

    def _with_normalized(self, result: Any, normed: Tensor) -> Any:
        """What forward returns of a product's result and of x after the norm."""
        return result

    def _expanded_bias(self, bias: Tensor | None, y: Tensor, call: LinearCall, invariant: bool) -> Tensor | None:
        if bias is None:
            return None
        bias = as_local(bias)
        if self.gather_output:
            bias = gather_features(bias, self.group, call.stride)
        tokens_sharded = call.sequence_parallel and self.parallel_mode != "column"
        if invariant:
            return functions.expand_bias(bias, y.shape[:-1], tokens_sharded, call)
        whole = stock.complete_grad(bias, self.group, tokens_sharded)
        return None if whole is None else whole.expand(y.shape)

    # --- what a call is checked for ---------------------------------------------------------------------------------

    def _resolve_call(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Stride
    ) -> tuple[LinearCall, bool, NormCall | None]:
        """How this call goes, whether the mode is on, and the norm before: from the first call of its signature."""
        mode, signature = mode_if_cacheable(), None
        # without a bundled kernel for x it is up to a default gemm_fn, which may be another by then
        if mode is not None and (not mode or x.dtype in BUNDLED_DTYPES):
            signature = self._signature(mode, x, weight, bias, stride)
        known = self._agreed.lookup(signature)
        if known is not None and known[0].group is self.group and known[0].gemm_fn is self.gemm_fn:
            if known[0].main_grad is None or self._has_main_grad(known[0].main_grad):
                return known
            self._agreed.resolved.clear()  # each holds the weight that it adds for
        return self._agreed.store(signature, self._first_call(x, weight, bias, stride))

    def _first_call(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Stride
    ) -> tuple[LinearCall, bool, NormCall | None]:
        """`_resolve_call` of a signature's first call, after the checks on this rank and across ranks."""
        # a parametrized weight is not computed once more: that may draw random numbers or count calls
        own = self._parameters.get("weight")
        invariant = check_first_use(
            self, x, lambda: self._check_call(x, weight),
            lambda invariant: self._signature(invariant, x, weight, bias, stride), self._OPTIONS,
            sharded_weight=None if self.parallel_mode is None else own, weight=own, part=self._part(x),
        )  # fmt: skip
        if invariant:
            check_dtype(self.gemm_fn, x, f"x on rank {self.group.rank}")
        else:
            stock.log_once(self.group)
        assert self._gemm_fn_name  # guards it: torch.compile takes functions of the same code for the same one
        call = LinearCall(
            self.group,
            self.sequence_parallel and self.group.size > 1,
            self.sequence_dim,
            stride,
            self.owner_map,
            self.gemm_fn,
            main_grad=self._main_grad() if self.fuse_wgrad_accumulation else None,
        )
        return call, invariant, self._norm_call()

    def _part(self, x: Tensor) -> Part | None:
        """x, if each rank must pass another part of it."""
        name = f"x of {self._name}"
        if self.parallel_mode == "row" and self.input_is_parallel:
            tokens = self.sequence_dim if self.sequence_parallel else -2
            return Part(
                name, x, (tokens, -1), "Pass this rank's features, as a column-parallel layer without gather_output "
                f"returns them, or all {self.in_features} of them and input_is_parallel=False",
            )  # fmt: skip
        if self.parallel_mode != "row" and self.sequence_parallel:
            return part_of_tokens(name, x, self.sequence_dim)
        return None

    def _signature(
        self, invariant: bool, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Stride
    ) -> CallSignature:
        layer = self.in_features, self.out_features, self.parallel_mode, self.input_is_parallel
        return CallSignature(
            invariant, layer, self._options(x, bias, stride), x.shape, x.dtype, x.device, x.requires_grad,
            weight.shape, weight.dtype, weight.requires_grad, torch.is_grad_enabled(),
        )  # fmt: skip

    def _options(self, x: Tensor, bias: Tensor | None, stride: Stride) -> tuple[Any, ...]:
        options = (
            bias is not None, stride, self.sequence_parallel, self.sequence_dim, self.owner_map, self.gather_output,
            self.return_bias, self.fuse_wgrad_accumulation,
        )  # fmt: skip
        if not self._moves_bytes:  # then the rest is of no matter
            return options
        ahead = weight_cache.ahead, weight_cache.ahead_in_graphs, weight_cache.keep
        return *options, _costs_text(x.device), gemm_fn_name(self.gemm_fn, x.device), ahead

    @property
    def _moves_bytes(self) -> bool:
        """Whether calls take several ranks, which must then agree."""
        return self.group.size > 1 and (self.sequence_parallel or self.parallel_mode is not None)

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.in_features}, {self.out_features}, {self.parallel_mode!r})"

    @property
    def _where(self) -> str:
        """The input, the layer and the rank, for errors alone: a compiler would make a graph for each name."""
        name = getattr(self._parameters.get("weight"), "name_in_model", None)
        layer = self._name if name is None else f"{name.rpartition('.')[0]}, a {self._name},"
        return f"x of {layer} on rank {self.group.rank}"

    def _main_grad(self) -> MainGrad:
        if is_dtensor(self.weight):
            raise ValueError(
                f"fuse_wgrad_accumulation=True of {self._name} on rank {self.group.rank} needs a weight that is a "
                "plain tensor: give tp_group as a ProcessGroup (mesh.get_group())"
            )
        return MainGrad(self.weight, f"the weight of {self._name}", self.group.rank)

    def _has_main_grad(self, known: MainGrad) -> bool:
        """Whether `known` is the present weight's, whose main_grad can be added to if a gradient will be."""
        weight = self._parameters.get("weight")
        if weight is None or known.weight is not weight:
            return False
        try:
            return not (torch.is_grad_enabled() and weight.requires_grad) or known.buffer() is not None
        except (TypeError, ValueError):  # the checks find it again, and tell the other ranks
            return False

    def _check_call(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the mode is on, after the checks of this rank."""
        self._check_input(x, weight)
        invariant = is_tp_invariant_mode_enabled()
        if invariant and self._norm_call() is not None:
            check_norm_dtype(x, f"x on rank {self.group.rank}")
        if invariant and self._moves_bytes and not self.masks_are_whole:
            self._check_masks(x)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled() and self.weight.requires_grad:
            self._main_grad().buffer()
        if invariant:
            tokens = x.numel() // max(x.shape[-1], 1)
            if self.sequence_parallel and self.parallel_mode != "row":
                tokens *= self.group.size
            check_first_product(
                self.gemm_fn, self._agreed, x, (tokens, self.in_features, self.out_features), weight.dtype,
                self.group, self._name, biased=self._parameters.get("bias") is not None,
            )  # fmt: skip
        return invariant

    def _check_masks(self, x: Tensor) -> None:
        """Raises: ValueError: x is this rank's part of the activations, and dropout has acted on it."""
        row = self.parallel_mode == "row"
        if torch.compiler.is_compiling() or not (self.input_is_parallel if row else self.sequence_parallel):
            return
        if node := _dropout_before(x):
            raise ValueError(
                f"x of {self._name} on rank {self.group.rank} is this rank's part of the "
                f"{'features' if row else 'tokens'}, and dropout has acted on it since the layer before ({node}): its "
                "mask would depend on the degree. Set p to 0 there, or use dropout where activations are whole, as "
                "before a column-parallel layer and after a row-parallel one without sequence_parallel. If the mask is "
                "this rank's part of one that all ranks have drawn, set masks_are_whole = True of this layer"
            )

    def _check_input(self, x: Tensor, weight: Tensor) -> None:
        features = local_of(self.weight).shape[1] if self.input_is_parallel else self.in_features
        if x.dim() < 2 or x.shape[-1] != features:
            advice = ""
            if x.dim() > 1 and features < self.in_features == x.shape[-1]:
                advice = ". x has all features: set input_is_parallel=False (in a plan 'rowwise_split_input'), or make "
                advice += "the layer before it column-parallel"
            elif x.dim() > 1 and features == self.in_features and x.shape[-1] and not features % x.shape[-1]:
                advice = ". If x is this rank's part, as a column-parallel layer returns it, set gather_output=True "
                advice += "there (in a plan 'colwise_gather_output'), or make this layer row-parallel"
            raise ValueError(
                f"{self._where} has shape {tuple(x.shape)}: it must be [.., {features}] with at least one token dim "
                f"(in_features={self.in_features}, TP degree {self.group.size}){advice}"
            )
        if x.dtype != weight.dtype:
            raise TypeError(
                f"{self._where} is {x.dtype}, and its weight {weight.dtype}: convert one of them, or use torch.autocast"
            )
        if x.device != weight.device:
            advice = "call model.to_empty(device=..) and load or initialise the weights" if weight.is_meta else (
                "move one of them"
            )  # fmt: skip
            raise ValueError(f"{self._where} is on {x.device}, and its weight on {weight.device}: {advice}")
        if self.sequence_parallel:
            if not 0 <= self.sequence_dim < x.dim() - 1:
                raise ValueError(
                    f"sequence_dim={self.sequence_dim} is not a token dim of x with shape {tuple(x.shape)}: it must be "
                    f"from 0 to {x.dim() - 2}"
                )
            if self.parallel_mode == "row" and x.shape[self.sequence_dim] % self.group.size:
                check_sequence(x.shape, self.sequence_dim, self.group.size, self._where)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.parallel_mode is not None:
            text += f", parallel_mode={self.parallel_mode!r}, tp={self.group.rank}/{self.group.size}"
        if self.partition_sizes is not None:
            text += f", partition_sizes={self.partition_sizes}"
        return text + (", sequence_parallel=True" if self.sequence_parallel else "")


def _dropout_before(x: Tensor) -> str | None:
    """The node of dropout between the layers before and x, if there is one. On a CPU none has that name."""
    nodes, seen = [x.grad_fn], set[Any]([None])
    while nodes:
        node: Any = nodes.pop()
        if node in seen or node.name().endswith(_NODES_OF_LAYERS):
            continue
        if "Dropout" in node.name():
            return str(node.name())
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return None


def _check_stride(stride: Any) -> int:
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        raise ValueError(f"partition_stride={stride!r} is not a positive integer")
    return stride


def check_sizes(sizes: Any, size: int, world: int, size_name: str) -> Stride:
    """partition_sizes in this library's form: the number of pieces if all sizes are equal, else a tuple of sizes.

    Raises:
        ValueError: no sizes, a size that is not a positive integer or that `world` does not divide, or a sum that is
            not `size`.
    """
    kept = tuple(sizes) if isinstance(sizes, Sequence) and not isinstance(sizes, str) else ()
    if not kept or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in kept):
        raise ValueError(f"partition_sizes={sizes!r} must be positive integers, the full sizes of the pieces")
    if sum(kept) != size:
        raise ValueError(f"partition_sizes={kept} add up to {sum(kept)}: they must add up to {size_name}={size}")
    for n in kept:
        check_divides(n, world, size_name=f"a piece of {size_name}={size}: its size")
    return len(kept) if len(set(kept)) == 1 else kept


@constant
def _costs_text(device: torch.device) -> str:
    return costs_of(device).text
