"""What a linear layer finds out before it computes: that its input fits, that all ranks make the same call, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Group
from ..consistency.agreement import Agreed, check_agreement, refuse
from ..core.compiled import constant
from ..core.dtensors import is_dtensor, local_of
from ..core.layout import Stride, check_divides
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.options import OwnerMap, ParallelMode
from ..functional import stock
from ..functional.linear import LinearCall
from ..functional.main_grad import MainGrad
from ..gemm.cost_model import costs_of
from ..gemm.gemm_fn import BUNDLED_DTYPES, GemmFn, check_dtype, gemm_fn_name
from ..gemm.weight_cache import weight_cache
from .call_signature import CallSignature, facts_of, mode_of_known_calls, signature_of
from .parameters import ShardedModule


class CheckedCalls(ShardedModule, nn.Linear):
    """The part of Linear that checks its calls; the attributes are Linear's."""

    group: Group
    gemm_fn: GemmFn | None
    _gemm_fn_name: str
    parallel_mode: ParallelMode | None
    owner_map: OwnerMap
    sequence_parallel: bool
    sequence_dim: int
    gather_output: bool
    input_is_parallel: bool
    return_bias: bool
    fuse_wgrad_accumulation: bool
    _agreed: Agreed

    def _settle(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Stride) -> tuple[LinearCall, bool]:
        """How this call goes, and whether the mode is on: checked here and over the ranks, once for a kind of call."""
        mode, signature = mode_of_known_calls(), None
        # without a bundled kernel for x it is up to a default gemm_fn, which may be another by then
        if mode is not None and not self.fuse_wgrad_accumulation and (not mode or x.dtype in BUNDLED_DTYPES):
            signature = self._signature(mode, x, weight, bias, stride)
        found = self._agreed.found(signature)
        if found is not None and found[0].group is self.group and found[0].gemm_fn is self.gemm_fn:
            return found
        invariant = self._check_call(x, weight.dtype)
        sharded = self.sequence_parallel and self.group.size > 1
        assert self._gemm_fn_name  # guards it: torch.compile takes functions of the same code for the same one
        call = LinearCall(
            self.group,
            sharded,
            self.sequence_dim,
            stride,
            self.owner_map,
            self.gemm_fn,
            main_grad=self._main_grad() if self.fuse_wgrad_accumulation else None,
        )
        if self._moves_bytes:
            told = self._signature(invariant, x, weight, bias, stride) if signature is None else signature
            check_agreement(facts_of(told, self._name), self.group, x.device, self._agreed)
        if invariant:
            check_dtype(self.gemm_fn, x, f"x on rank {self.group.rank}")
        else:
            stock.log_once(self.group)
        return self._agreed.settle(signature, (call, invariant))

    def _signature(
        self, invariant: bool, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Stride
    ) -> CallSignature:
        layer = self.in_features, self.out_features, self.parallel_mode, self.input_is_parallel
        return signature_of(invariant, layer, self._options(x.device, bias, stride), x, weight)

    def _options(self, device: torch.device, bias: Tensor | None, stride: Stride) -> tuple[tuple[str, Any], ...]:
        options = (
            ("bias", bias is not None),
            ("partition_stride", stride),
            ("sequence_parallel", self.sequence_parallel),
            ("sequence_dim", self.sequence_dim),
            ("owner_map", self.owner_map),
            ("gather_output", self.gather_output),
            ("return_bias", self.return_bias),
            ("fuse_wgrad_accumulation", self.fuse_wgrad_accumulation),
        )
        if not self._moves_bytes:  # then the rest is of no matter
            return options
        return (
            *options,
            ("what owner_map='auto' goes by", _costs_text(device)),
            ("gemm_fn", gemm_fn_name(self.gemm_fn, device)),
            ("weight_cache's ahead, ahead_in_graphs and keep", _gathers_ahead()),
        )

    @property
    def _moves_bytes(self) -> bool:
        """Whether calls take several ranks, which must then agree."""
        return self.group.size > 1 and (self.sequence_parallel or self.parallel_mode is not None)

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.in_features}, {self.out_features}, {self.parallel_mode!r})"

    def _main_grad(self) -> MainGrad:
        if is_dtensor(self.weight):
            raise ValueError(
                f"fuse_wgrad_accumulation=True of {self._name} on rank {self.group.rank} needs a weight that is a "
                "plain tensor: give tp_group as a ProcessGroup (mesh.get_group())"
            )
        return MainGrad(self.weight, f"the weight of {self._name}", self.group.rank)

    def _check_call(self, x: Tensor, weight_dtype: torch.dtype, more: Callable[[], None] | None = None) -> bool:
        """Whether the mode is on; what this rank finds wrong with the call, all ranks get to know."""
        try:
            self._check_input(x, weight_dtype)
            invariant = is_tp_invariant_mode_enabled()
            if invariant and more is not None:
                more()
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled() and self.weight.requires_grad:
                self._main_grad().buffer()
            return invariant
        except (TypeError, ValueError) as error:
            if self._moves_bytes:
                refuse(error, self.group, x.device, self._agreed)
            raise

    def _check_input(self, x: Tensor, weight_dtype: torch.dtype) -> None:
        features = local_of(self.weight).shape[1] if self.input_is_parallel else self.in_features
        if x.dim() < 2 or x.shape[-1] != features:
            raise ValueError(
                f"x has shape {tuple(x.shape)} on rank {self.group.rank}: it must be [.., {features}] with at least "
                f"one token dim (in_features={self.in_features}, parallel_mode={self.parallel_mode!r}, "
                f"TP degree {self.group.size})"
            )
        if x.dtype != weight_dtype:
            raise TypeError(
                f"x is {x.dtype} and weight is {weight_dtype} on rank {self.group.rank}: convert one of them, or use "
                "torch.autocast"
            )
        if self.sequence_parallel:
            if not 0 <= self.sequence_dim < x.dim() - 1:
                raise ValueError(
                    f"sequence_dim={self.sequence_dim} is not a token dim of x with shape {tuple(x.shape)}: it must be "
                    f"from 0 to {x.dim() - 2}"
                )
            if self.parallel_mode == "row":
                name = f"size of sequence_dim {self.sequence_dim} of x"
                check_divides(x.shape[self.sequence_dim], self.group.size, size_name=name, parts_name="TP degree")


def _gathers_ahead() -> tuple[bool, bool, int]:
    return weight_cache.ahead, weight_cache.ahead_in_graphs, weight_cache.keep


@constant
def _costs_text(device: torch.device) -> str:
    return costs_of(device).text
