"""Transformer Engine's names: Linear, LayerNormLinear and LayerNormMLP, with its arguments, defaults and keys.

    import tp_invariant.integrations.transformer_engine as te  # in place of transformer_engine.pytorch

Positional arguments have Transformer Engine's order: the third of `Linear` is sequence_parallel, where that of
`tp_invariant.Linear` is bias. Each argument has its meaning, or is accepted without effect, or is refused by name
(`REFUSED`). Transformer Engine itself is not imported. docs/transformer_engine.md has the table.

Source: the signatures of transformer_engine/pytorch/module/{linear,layernorm_linear,layernorm_mlp}.py, version 2.20.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, resolve_group
from ..core.dtensors import local_of
from ..core.elementwise import call_in_whole_vectors
from ..core.options import Normalization, ParallelMode
from ..functional.gated import gated_activation
from ..gemm.gemm_fn import GemmFn
from ..layers.layernorm_linear import LayerNormLinear as _LayerNormLinear
from ..layers.linear import Linear as _Linear
from ..layers.parameters import ShardedModule, ShardSpec, full_initialisation

TpGroup = dist.ProcessGroup | DeviceMesh | Group | None

_OVERLAP = "Leave it False: this library overlaps transfers with products by itself"
_FP8 = "Leave it False: there is no fp8 here"
# {argument: what to do}, of those that must have their default, which is False or None
REFUSED = {
    "parameters_split": "Make one weight of them (torch.cat along dim 0, in a checkpoint too): "
    "tp_invariant.Linear(.., partition_sizes=..) has each rank's parts of them in the same order",
    "ub_overlap_ag": _OVERLAP,
    "ub_overlap_rs": _OVERLAP,
    "ub_overlap_rs_dgrad": _OVERLAP,
    "ub_bulk_dgrad": _OVERLAP,
    "ub_bulk_wgrad": _OVERLAP,
    "delay_wgrad_compute": "Leave it False: weight gradients are computed in backward, and there is no backward_dw()",
    "symmetric_ar_type": "Leave it None: an all-reduce adds in an order that depends on the degree",
    "checkpoint": "Leave it False, and call the module by torch.utils.checkpoint.checkpoint(.., use_reentrant=False)",
    "activation_params": "Leave it None: no activation that is supported has parameters",
    "fp8_output": _FP8,
    "fp8_grad": _FP8,
}
_GATED = {"geglu": "gelu_tanh", "swiglu": "silu", "reglu": "relu"}
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: call_in_whole_vectors(F.gelu, (x,), {"approximate": "tanh"}),
    "silu": lambda x: call_in_whole_vectors(F.silu, (x,), {}),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
}


def _refuse(name: str, rank: int, arguments: Mapping[str, Any]) -> None:
    """Raises: ValueError: an argument of REFUSED is not False or None."""
    for argument, value in arguments.items():
        if argument in REFUSED and value is not None and value is not False:
            raise ValueError(f"{argument}={value!r} of {name} on rank {rank} is not supported. {REFUSED[argument]}")


def _checked_group(name: str, arguments: Mapping[str, Any]) -> Group:
    """The Group of tp_group, after the checks of a constructor's arguments.

    Raises:
        ValueError: an argument is refused, or tp_size is not the size of tp_group.
    """
    group, size = resolve_group(arguments["tp_group"]), arguments["tp_size"]
    _refuse(name, group.rank, arguments)
    if size not in (1, group.size):  # 1 is the default, also beside a group
        raise ValueError(
            f"tp_size={size!r} of {name} on rank {group.rank} is not the size of tp_group, {group.size}: give "
            "tp_group to the constructor (a later set_tensor_parallel_group is too late), and tp_size to match or not"
        )
    return group


def accept_no_extra_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before state is loaded: layers of other classes saved no `_extra_state`."""
    state_dict.setdefault(f"{prefix}_extra_state", None)


class _NamedLayer(ShardedModule):
    """What the three classes have in common: initialisation, the group's setter, and `_extra_state`."""

    WEIGHTS: tuple[str, ...] = ("weight",)
    fuse_wgrad_accumulation: bool
    zero_centered_gamma: bool

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """New values for the full layer, of which this rank's part is stored: they depend on the seed alone.

        Weights by init_method, else normal with standard deviation 0.023; biases zero; the norm the identity. Use the
        same seed on all ranks. Does nothing on the meta device: call `to_empty(device=..)` first.
        """
        for name in () if defer_init else self.SHARDED_PARAMETERS:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.is_meta:
                continue
            spec, local = self.shard_spec(name), local_of(parameter)
            if name not in self.WEIGHTS:
                gamma_of_one = name == "layer_norm_weight" and not self.zero_centered_gamma
                nn.init.constant_(local, 1.0 if gamma_of_one else 0.0)
                continue
            shape = list(local.shape)
            if spec.dim is not None:
                shape[spec.dim] *= spec.group.size
            with full_initialisation(parameter, tuple(shape), spec) as full, torch.no_grad():
                (self._init_method_of(name) or partial(nn.init.normal_, std=0.023))(full)

    def _init_method_of(self, name: str) -> Callable[[Tensor], Any] | None:
        return self.init_method  # type: ignore[return-value]

    def set_tensor_parallel_group(self, tp_group: TpGroup) -> None:
        """Raises: ValueError: tp_group is not the one that the layer was made with."""
        if resolve_group(tp_group) != self.group:
            raise ValueError(
                f"set_tensor_parallel_group of {type(self).__name__} on rank {self.group.rank} got another group than "
                f"the one of size {self.group.size} that it was made with: give tp_group to the constructor"
            )

    def get_extra_state(self) -> Tensor:
        """No bytes, as Transformer Engine saves without fp8."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Raises: ValueError: `state` is not None and not empty: it is of fp8."""
        size = state.getbuffer().nbytes if isinstance(state, io.BytesIO) else getattr(state, "numel", lambda: 1)()
        if state is not None and size:
            raise ValueError(
                f"_extra_state of {type(self).__name__} on rank {self.group.rank} holds fp8 state ({size} bytes), and "
                "there is no fp8 here. To load the weights alone set its key to torch.empty(0, dtype=torch.uint8)"
            )

    def _begin(self, is_first_microbatch: bool | None, **fp8: bool | None) -> None:
        """Before each forward. With fuse_wgrad_accumulation a first micro-batch replaces what main_grad holds."""
        _refuse(type(self).__name__, self.group.rank, fp8)
        if is_first_microbatch and self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            for weight in map(self.get_parameter, self.WEIGHTS):
                if weight.requires_grad and isinstance(main_grad := getattr(weight, "main_grad", None), Tensor):
                    main_grad.zero_()


class _NamedLinear(_NamedLayer):
    """The forward of `Linear` and `LayerNormLinear`."""

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """inp [.., in_features], tp_invariant.Linear's x -> y, or a tuple `(y[, bias][, norm's output])`."""
        self._begin(is_first_microbatch, fp8_output=fp8_output, fp8_grad=fp8_grad)
        return super().forward(inp)


class Linear(_NamedLinear, _Linear):
    """tp_invariant.Linear under Transformer Engine's name and arguments; the bits of TP=1 at every degree.

    Args:
        sequence_parallel: of dim 0.
        tp_size: of tp_group; 1, the default, goes with any group.
        return_bias: forward returns (y, bias); the bias is expanded to y's shape, for a gradient in a fixed order.
        is_first_microbatch: of forward; without fp8 it has a meaning with fuse_wgrad_accumulation alone: True begins
            main_grad anew.
        gemm_fn: as for tp_invariant.Linear, the only argument that is not Transformer Engine's.

    Raises:
        ValueError: an argument of REFUSED, with what to do; a tp_size that is not tp_group's; else as tp_invariant's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: TpGroup = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        gemm_fn: GemmFn | None = None,
    ) -> None:
        group = _checked_group("Linear", locals())
        _Linear.__init__(
            self, in_features, out_features, bias, parallel_mode=parallel_mode, tp_group=group,
            sequence_parallel=sequence_parallel, return_bias=return_bias, init_method=init_method,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, gemm_fn=gemm_fn, device=device, dtype=params_dtype,
        )  # fmt: skip
        self.register_load_state_dict_pre_hook(accept_no_extra_state)


class LayerNormLinear(_NamedLinear, _LayerNormLinear):
    """tp_invariant.LayerNormLinear under Transformer Engine's name and arguments: see `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: TpGroup = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        gemm_fn: GemmFn | None = None,
    ) -> None:
        group = _checked_group("LayerNormLinear", locals())
        _LayerNormLinear.__init__(
            self, in_features, out_features, eps, bias, normalization=normalization,
            zero_centered_gamma=zero_centered_gamma, return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output and return_layernorm_output_gathered,
            parallel_mode=parallel_mode, tp_group=group, sequence_parallel=sequence_parallel, return_bias=return_bias,
            init_method=init_method, fuse_wgrad_accumulation=fuse_wgrad_accumulation, gemm_fn=gemm_fn, device=device,
            dtype=params_dtype,
        )  # fmt: skip
        self.register_load_state_dict_pre_hook(accept_no_extra_state)


class LayerNormMLP(_NamedLayer):
    """y = fc2(act(fc1(norm(x)))), x and y [.., hidden_size], by Transformer Engine's arguments: see `Linear`.

    For H = hidden_size, I = ffn_hidden_size and P ranks (set_parallel_mode; else whole). Gated activations have
    act(gate) * up, and [gate; up] in fc1, of which a rank has [gate_r; up_r]:

        layer_norm_weight, layer_norm_bias [H]   fc1_weight [I/P, H] or [2I/P, H]   fc1_bias [I/P] or [2I/P]
                                                 fc2_weight [H, I/P]                fc2_bias [H]

    Args:
        activation: "gelu" (by tanh), "silu", "relu", "srelu", or gated "geglu" (by tanh), "swiglu", "reglu".
        set_parallel_mode: FC1 column-parallel and FC2 row-parallel; needed on more than one rank.
        init_method, output_layer_init_method: of fc1_weight and of fc2_weight.

    Raises:
        ValueError: another activation; a tp_group of several ranks without set_parallel_mode; else as `Linear`.
    """

    WEIGHTS = "fc1_weight", "fc2_weight"
    SHARDED_PARAMETERS = "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable | None = None,
        tp_group: TpGroup = None,
        tp_size: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        *,
        gemm_fn: GemmFn | None = None,
    ) -> None:
        group = _checked_group("LayerNormMLP", locals())
        super().__init__()
        if activation not in (*_GATED, *_PLAIN):
            raise ValueError(
                f"activation={activation!r} of LayerNormMLP on rank {group.rank} is not supported: choose one of "
                f"{', '.join((*_PLAIN, *_GATED))}, or write your own between LayerNormLinear and Linear"
            )
        if group.size > 1 and not set_parallel_mode:
            raise ValueError(
                f"set_parallel_mode={set_parallel_mode!r} of LayerNormMLP on rank {group.rank} goes with one rank, and "
                f"tp_group has {group.size}: set it to True, or give no tp_group"
            )
        self.group, self.activation = group, activation
        self.fuse_wgrad_accumulation, self.zero_centered_gamma = fuse_wgrad_accumulation, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self._init_methods = {"fc1_weight": init_method, "fc2_weight": output_layer_init_method}
        options: dict[str, Any] = dict(
            tp_group=group, sequence_parallel=sequence_parallel, gemm_fn=gemm_fn, device="meta", dtype=params_dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        )  # fmt: skip
        pieces = 2 if activation in _GATED else 1
        fc1 = _LayerNormLinear(
            hidden_size, pieces * ffn_hidden_size, eps, bias, normalization=normalization,
            zero_centered_gamma=zero_centered_gamma, return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output and return_layernorm_output_gathered,
            parallel_mode="column" if set_parallel_mode else None,
            partition_stride=pieces if set_parallel_mode else 1, **options,
        )  # fmt: skip
        fc2 = _Linear(
            ffn_hidden_size, hidden_size, bias, parallel_mode="row" if set_parallel_mode else None,
            return_bias=return_bias, **options,
        )  # fmt: skip
        # in a tuple they are no submodules: their parameters are this module's, under its names
        self._linears: tuple[_LayerNormLinear, _Linear] = fc1, fc2
        for own, layer, its in self._places():
            empty = layer._parameters[its]
            if empty is not None:
                empty = nn.Parameter(torch.empty_like(local_of(empty), device=device))
            self.register_parameter(own, empty)
        self._hand_parameters_over()
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(accept_no_extra_state)

    def _places(self) -> Iterator[tuple[str, _Linear, str]]:
        """(the name of a parameter, the layer that computes with it, its name there)."""
        for own in self.SHARDED_PARAMETERS:
            place, _, its = own.partition("_")
            yield (own, self._linears[0], own) if place == "layer" else (own, self._linears[place == "fc2"], its)

    def _hand_parameters_over(self) -> None:
        """Puts this module's parameters, of which some may be replaced, into the layers that compute with them."""
        for own, layer, its in self._places():
            tensor = self._parameters[own] if own in self._parameters else getattr(self, own)
            if layer._parameters.get(its) is tensor:
                continue
            if tensor is None or isinstance(tensor, nn.Parameter):
                setattr(layer, its, tensor)
            else:  # of torch.func.functional_call or a parametrization
                layer._parameters[its] = tensor

    def shard_spec(self, name: str) -> ShardSpec:
        return next(layer.shard_spec(its) for own, layer, its in self._places() if own == name)

    def _init_method_of(self, name: str) -> Callable[[Tensor], Any] | None:
        return self._init_methods[name]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """inp [.., hidden_size], this rank's tokens under SP -> y of its shape, or `(y[, bias][, norm's output])`."""
        self._begin(is_first_microbatch)
        self._hand_parameters_over()
        fc1, fc2 = self._linears
        hidden = fc1(inp)
        hidden, *normed = hidden if self.return_layernorm_output else (hidden,)
        if self.activation in _GATED:
            y = fc2(gated_activation(hidden, activation=_GATED[self.activation]))  # type: ignore[arg-type]
        else:
            y = fc2(_PLAIN[self.activation](hidden))
        return (*(y if isinstance(y, tuple) else (y,)), *normed) if normed else y
