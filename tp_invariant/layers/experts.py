"""Experts: the expert networks of a mixture of experts, computed by their owners over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.call_records import call_context
from ..comm.collectives import Group, is_capturing, ranks_of, resolve_group
from ..consistency.agreement import AgreedCalls, check_agreement, compare_call, share_error
from ..consistency.shards import part_of_tokens
from ..core.autocast import autocast_dtype
from ..core.dtensors import as_local, local_of, refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.fsdp import resharded_whole
from ..core.graph_breaks import outside_of_graphs
from ..core.identity import identify
from ..core.layout import check_divides
from ..core.mode import is_tp_invariant_mode_enabled
from ..functional import stock
from ..functional.experts import (
    Dispatch,
    ExpertWeight,
    PartialSums,
    check_gate,
    combine,
    dispatch,
    dispatch_over_data,
    expert_range,
    gate,
    grouped_linear,
    token_rows,
)
from ..functional.gated import invariant_gated_halves
from ..functional.linear import flatten_tokens
from ..functional.partial_gradients import partial_gradients_of
from ..functional.vocab import check_ids
from ..gemm.gemm_fn import BUNDLED_DTYPES, GemmFn, check_dtype, check_signature, gemm_fn_name
from ..gemm.slice_check import check_first_product
from ..kernels.rowwise.reference_gated import ACTIVATIONS, halves
from .parameters import ShardedModule, ShardSpec, full_initialisation

Activation = Callable[[Tensor], Tensor]
_WHOLE = ExpertWeight(Group(None, 0, 1), 0, None, 1)  # on one rank, however many experts there are

_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Experts(ShardedModule):
    """y = the sum over a token's experts e of its weight for e times down[e] gate(up[e] x); one result at every degree.

    Each expert is computed by one rank, which has its whole weights and gets its rows from all ranks:
    functional/experts.py says how. Parameters have the names and layout of transformers' experts (E experts, H and I
    features, P ranks):

                             whole        stored by inner features           stored by expert
        gate_up_proj         [E, 2I, H]   [E, 2I/P, H], [gate_r; up_r]       [E/P, 2I, H]
        down_proj            [E, H, I]    [E, H, I/P]                        [E/P, H, I]
        gate_up_proj_bias    [E, 2I]      [E, 2I/P]                          [E/P, 2I]
        down_proj_bias       [E, H]       [E, H]                             [E/P, H]

    Stored by inner features, the weights of an expert are sent to its owner in forward and in backward, and their
    gradients back; stored by expert, they stay. Every gradient is complete when backward returns. Memory and traffic
    differ, the bits of outputs and gradients do not. The bits of the gradient norm are the same at every degree, but
    differ between the two ways: clip_grad_norm_ adds the squares slice by slice of the dim that is sharded.

    There is no capacity: every token gets all experts that its top_k_index names, and none is dropped.

    Over several replicas each has a micro-batch of its own, of any number of tokens, and all call the layer together.
    The gradients of an expert are then one partial sum for each micro-batch, which data_parallel.MicroBatchTree folds
    as it folds those of dense parameters: the bits are those of one replica that computes all micro-batches. Make the
    tree before the first forward that needs gradients. A rank that makes another call gets an error, as do all others.

    Args:
        num_experts: E. Experts are divided over ranks as evenly as possible; a rank may have none. Stored by expert the
            degree must divide E, stored by inner features it must divide I.
        hidden_size, intermediate_size: H and I.
        bias: whether both products add one.
        gated: y = act(gate) * up, with both halves in gate_up_proj; otherwise act(up), and the first parameter is
            up_proj [E, I, H].
        activation: "silu", "gelu", "gelu_tanh", "relu", or a function of elementwise operators; or "clamped_silu" with
            gated (gpt-oss): g * sigmoid(1.702 * g) * (u + 1), where g is at most 7 and u within -7 and 7.
        gate_fn: in place of activation: a function from the first product [R, 2I] to [R, I], of elementwise operators.
        interleaved: gate and up alternate, [g0, u0, g1, u1, ..], instead of [gate; up].
        transposed: weights are [E, H, 2I] and [E, I, H] (gpt-oss), and sharded along the same features.
        tp_group: a ProcessGroup or a 1-D DeviceMesh; None is TP=1. With a DeviceMesh parameters are DTensors.
        expert_parallel_group: stores parameters by expert over this group. It has the ranks of tp_group, or those of
            several replicas (data-parallel ranks): then all ranks of each replica, one replica after another. Give it
            on one rank, too, for the gradient norm that other degrees have: a group of this rank alone.
        sequence_parallel, sequence_dim: whether, and along which dim, the tokens of all arguments and of the result are
            sharded over the ranks.
        init_method: called with each full weight; else both weights and biases are uniform, as nn.Linear's are.
        gemm_fn: as for Linear.
        device, dtype: as for nn.Linear; "meta" works, followed by `to_empty()` and `reset_parameters()`.

    Raises:
        ValueError: sizes that the degree does not divide, an unknown option, or groups that do not fit.
        TypeError: a group or a function of the wrong kind.
    """

    holders: Group  # the ranks that hold the same micro-batch, whole or a part of its tokens each: those of tp_group

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        gated: bool = True,
        activation: str | Activation = "silu",
        gate_fn: Activation | None = None,
        interleaved: bool = False,
        transposed: bool = False,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        expert_parallel_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        init_method: Callable[[Tensor], Any] | None = None,
        gemm_fn: GemmFn | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        activations = {**_ACTIVATIONS, **(ACTIVATIONS if gated else {})}
        if isinstance(activation, str) and activation not in activations:
            names = ", ".join(map(repr, activations))
            raise ValueError(f"activation={activation!r} is unknown: choose one of {names}, or give a function")
        if interleaved and not gated:
            raise ValueError("interleaved=True needs gated=True: there is only one kind of inner feature")
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.gated, self.interleaved, self.transposed = gated, interleaved, transposed
        self.group = self.holders = resolve_group(tp_group)
        self.by_expert = expert_parallel_group is not None
        if expert_parallel_group is not None:
            stored_over = resolve_group(expert_parallel_group)
            check_replicas_of(self.holders, stored_over)
            if stored_over.size > self.holders.size:
                self.group = stored_over
                if tp_group is not None and (self.holders.mesh is None) != (stored_over.mesh is None):
                    raise ValueError(
                        "of tp_group and expert_parallel_group one is a DeviceMesh and the other a ProcessGroup: give "
                        "two meshes, which make all parameters DTensors, or two ProcessGroups (mesh.get_group())"
                    )
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.init_method = init_method
        self.activation, self.gate_fn = activation, gate_fn
        self._agreed = AgreedCalls(self.group)
        self.gemm_fn = gemm_fn
        self._agreed_by_holders = AgreedCalls(self.holders) if self.over_data else self._agreed
        self._checked_gate: tuple | None = None  # what check_gate has passed

        self.up_name = "gate_up_proj" if gated else "up_proj"
        self.SHARDED_PARAMETERS = self._all_names() if bias else self._all_names()[:2]
        name, parts_name = "intermediate_size", "TP degree"
        if self.by_expert:
            name, parts_name = "num_experts", "expert-parallel degree"
        check_divides(sizes[name], self.group.size, size_name=name, parts_name=parts_name)
        for name in self.SHARDED_PARAMETERS:
            shape, spec = self._full_shape(name), self.shard_spec(name)
            if spec.dim is not None:
                shape[spec.dim] //= self.group.size
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    # --- parameters -------------------------------------------------------------------------------------------------

    @property
    def over_data(self) -> bool:
        """Whether the experts are divided over several replicas, each of which has a micro-batch of its own."""
        return self.group.size > self.holders.size

    def _mark(self, name: str, tensor: Tensor) -> None:
        super()._mark(name, tensor)
        tensor.ranks_per_micro_batch = self.holders.size if self.over_data else None  # type: ignore[attr-defined]

    def _full_shape(self, name: str) -> list[int]:
        inner = self.intermediate_size * (2 if self.gated else 1)
        out, k = self.hidden_size, self.intermediate_size
        if name.startswith(self.up_name):
            out, k = inner, self.hidden_size
        if name.endswith("_bias"):
            return [self.num_experts, out]
        return [self.num_experts, k, out] if self.transposed else [self.num_experts, out, k]

    def shard_spec(self, name: str) -> ShardSpec:
        if name not in self._all_names():  # a user's own
            return ShardSpec(self.group, None, 1)
        if self.by_expert:
            return ShardSpec(self.group, 0, 1)
        if name == "down_proj_bias":
            return ShardSpec(self.group, None, 1)
        is_up = name.startswith(self.up_name)
        dim = 1 if name.endswith("_bias") or is_up != self.transposed else 2
        return ShardSpec(self.group, dim, 2 if is_up and self.gated and not self.interleaved else 1)

    def reset_parameters(self) -> None:
        """Draws new values for all experts, by init_method or as nn.Linear does, and stores this rank's part.

        The values depend on the seed and not on the degree or on how they are stored. Use the same seed on all ranks.
        """
        for name in self.SHARDED_PARAMETERS:
            parameter = getattr(self, name)
            if parameter.is_meta:
                continue
            with full_initialisation(parameter, tuple(self._full_shape(name)), self.shard_spec(name)) as full:
                k = self.hidden_size if name.startswith(self.up_name) else self.intermediate_size
                if self.init_method is not None and not name.endswith("_bias"):
                    with torch.no_grad():
                        self.init_method(full)
                else:
                    nn.init.uniform_(full, -1 / math.sqrt(k), 1 / math.sqrt(k))

    @property
    def gemm_fn(self) -> GemmFn | None:
        return self._gemm_fn

    @gemm_fn.setter
    def gemm_fn(self, gemm_fn: GemmFn | None) -> None:
        self._gemm_fn = check_signature(gemm_fn)
        self._agreed.clear()  # the next call is checked as a first one, on all ranks

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [.., H], top_k_index and top_k_weights [.., k] -> [.., H], of hidden_states' dtype.

        top_k_index: int64 or int32, the experts of each token; top_k_weights: bfloat16, float16 or float32. Under
        sequence parallelism all three are this rank's tokens; otherwise all tokens, the same on every rank.
        torch.compile breaks the graph here, because the number of rows of a rank depends on the routing.

        Raises:
            ValueError: shapes that do not fit together; the call is captured in a CUDA graph over several ranks; or an
                activation or gate_fn is no function of each row by itself.
            TypeError: dtypes that are not supported.
            IndexError: an expert that does not exist, on a CPU; on CUDA a device-side assertion fails.
        """
        return self._forward(hidden_states, top_k_index, top_k_weights)

    @outside_of_graphs("the routing decides how many rows a rank has")
    def _forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        with inside_a_layer():
            return self._checked(x, index, weights)

    def _checked(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for name, tensor in (("hidden_states", x), ("top_k_index", index), ("top_k_weights", weights)):
            refuse_dtensor(tensor, f"{name} of {self._name}")
        dtype = autocast_dtype(x.device)
        x = x if dtype is None else x.to(dtype)
        own = [getattr(self, name, None) for name in self._all_names()]  # a parametrized one is computed
        invariant = is_tp_invariant_mode_enabled()
        try:
            self._check_input(x, index, weights, own[0] if dtype is None else None)
            if invariant:
                check_dtype(self.gemm_fn, x, f"hidden_states on rank {self.group.rank}")
                sizes = x.numel() // self.hidden_size, self.hidden_size, self.intermediate_size
                biased = len(self.SHARDED_PARAMETERS) > 2
                check_first_product(
                    self.gemm_fn, self._agreed, x, sizes, x.dtype, self.group, self._name, biased=biased
                )
        except (TypeError, ValueError, IndexError, NotImplementedError) as error:
            if self.over_data:
                self._gather_counts(x, index, weights, invariant, error=error)
            elif self.group.size > 1:
                share_error(error, self.group, x.device, self._agreed)
            raise
        if self.group.size > 1 and not self.over_data:
            self._compare_over_holders(x, index, weights, invariant)
        up, down, up_bias, down_bias = (
            p if p is None else as_local(p) if dtype is None else as_local(p).to(dtype) for p in own
        )
        assert up is not None and down is not None
        sequence_dim = self.sequence_dim if self.sequence_parallel and self.holders.size > 1 else None
        call_context.layer = self._agreed
        try:
            if invariant or self.over_data:
                if not invariant:
                    stock.log_once(self.group)
                y = self._by_owners(x, index, weights, (up, up_bias), (down, down_bias), sequence_dim, invariant)
            else:
                stock.log_once(self.group)
                first = expert_range(self.num_experts, self.group).start if self.by_expert else 0
                y = stock.experts(
                    x, index, weights, (up, up_bias, down, down_bias), self.group, first=first,
                    by_features=not self.by_expert, gate=self._gate, transposed=self.transposed,
                    sequence_dim=sequence_dim,
                )  # fmt: skip
        finally:
            call_context.layer = None
        return y

    def _by_owners(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        up: tuple[Tensor, Tensor | None],
        down: tuple[Tensor, Tensor | None],
        sequence_dim: int | None,
        invariant: bool,
    ) -> Tensor:
        if self.over_data:
            dispatched = self._dispatch_over_data(x, index, weights, sequence_dim, invariant)
        else:
            dispatched = dispatch(index, self.num_experts, self.group, sequence_dim)
        gemm_fn = self.gemm_fn if invariant else stock.gemm
        rows = token_rows(flatten_tokens(x), dispatched)
        inner = self._product(self.up_name, rows, up, dispatched, gemm_fn, invariant)
        inner = self._gate_invariantly(inner) if invariant else self._gate(inner)
        outer = self._product("down_proj", inner, down, dispatched, gemm_fn, invariant)
        return combine(outer, flatten_tokens(weights), dispatched).view(x.shape)

    def _product(
        self,
        name: str,
        rows: Tensor,
        weight: tuple[Tensor, Tensor | None],
        dispatched: Dispatch,
        gemm_fn: GemmFn | None,
        invariant: bool,
    ) -> Tensor:
        partial = None
        if dispatched.parts is not None:
            own = self._parameters[name]
            assert own is not None
            # with the mode off one sum of all micro-batches: the stock path is to be as it would be without the mode
            offsets = dispatched.parts if invariant else dispatched.offsets
            partial = PartialSums(
                offsets, self.group.size // self.holders.size, (own, self._parameters.get(f"{name}_bias"))
            )
        return grouped_linear(rows, *weight, dispatched.offsets, self._stored(name), self.transposed, gemm_fn, partial)

    def _gate_invariantly(self, h: Tensor) -> Tensor:
        if self.gate_fn is None and self.gated and self.activation in ACTIVATIONS:
            return invariant_gated_halves(h, self.activation, self.interleaved)
        kind = self.activation, self.gate_fn, self.interleaved, h.shape[-1], h.dtype, h.device
        if kind != self._checked_gate:
            check_gate(self._gate, h)
            self._checked_gate = kind
        return gate(h, self._gate)

    def _gate(self, h: Tensor) -> Tensor:
        if self.gate_fn is not None:
            return self.gate_fn(h)
        if self.activation == "clamped_silu":
            return stock.clamped_silu(*halves(h, interleaved=self.interleaved))
        activation = _ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        if not self.gated:
            return activation(h)
        gates, ups = halves(h, interleaved=self.interleaved)
        return activation(gates) * ups

    def _stored(self, name: str) -> tuple[ExpertWeight, ExpertWeight]:
        if self.group.size == 1:
            return _WHOLE, _WHOLE
        weight, bias = self.shard_spec(name), self.shard_spec(f"{name}_bias")
        assert isinstance(weight.stride, int) and isinstance(bias.stride, int)
        of_experts = self.group, self.num_experts
        return ExpertWeight(*of_experts, weight.dim, weight.stride), ExpertWeight(*of_experts, bias.dim, bias.stride)

    # --- what a call is checked for ---------------------------------------------------------------------------------

    def _all_names(self) -> tuple[str, ...]:
        return self.up_name, "down_proj", f"{self.up_name}_bias", "down_proj_bias"

    def _check_input(self, x: Tensor, index: Tensor, weights: Tensor, up: Tensor | None) -> None:
        """up: the first weight, None under autocast."""
        rank = self.group.rank
        if x.dim() < 2 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states has shape {tuple(x.shape)} on rank {rank}: it must be [.., {self.hidden_size}] with at "
                "least one token dim"
            )
        if index.shape != weights.shape or index.shape[:-1] != x.shape[:-1] or not index.shape[-1]:
            raise ValueError(
                f"top_k_index has shape {tuple(index.shape)} and top_k_weights {tuple(weights.shape)} on rank {rank}: "
                f"both must be {[*x.shape[:-1]]} of hidden_states, and the number of experts of a token"
            )
        if up is not None and x.dtype != up.dtype:
            raise TypeError(
                f"hidden_states is {x.dtype} and {self.up_name} is {up.dtype} on rank {rank}: convert one of them, or "
                "use torch.autocast"
            )
        if weights.dtype not in BUNDLED_DTYPES:
            raise TypeError(
                f"top_k_weights is {weights.dtype} on rank {rank}: it must be one of "
                + ", ".join(map(str, BUNDLED_DTYPES))
            )
        if self.sequence_parallel and not 0 <= self.sequence_dim < x.dim() - 1:
            raise ValueError(
                f"sequence_dim={self.sequence_dim} is not a token dim of hidden_states with shape {tuple(x.shape)} on "
                f"rank {rank}: it must be from 0 to {x.dim() - 2}"
            )
        if self.over_data and any(resharded_whole(local_of(p)) is not None for p in self.parameters(recurse=False)):
            raise ValueError(
                f"{self._name} on rank {rank} of expert_parallel_group is sharded by fully_shard, and its experts are "
                "divided over data-parallel ranks already: leave its parameters out, in each call of fully_shard of a "
                "module around it (fully_shard(.., ignored_params=set(experts.parameters())))"
            )
        if self.group.size > 1 and is_capturing():
            raise ValueError(
                f"{self._name} on rank {rank} is captured in a CUDA graph over {self.group.size} ranks: its "
                "all-to-alls have sizes that follow from the routing, and a graph cannot. Leave it out of the capture"
            )

    def _facts(self, x: Tensor, index: Tensor, weights: Tensor, invariant: bool) -> dict[str, Any]:
        grad = torch.is_grad_enabled()
        parameters = {name: self._parameters.get(name) for name in self.SHARDED_PARAMETERS}
        return {
            "the TP-invariant mode": invariant,
            "the layer": self._name,
            "whether it is stored by expert": self.by_expert,
            "gated, interleaved, transposed": (self.gated, self.interleaved, self.transposed),
            "the activation": _name_of(self.activation if self.gate_fn is None else self.gate_fn),
            "the sequence_dim that is sharded": self.sequence_dim if self.sequence_parallel else None,
            "gemm_fn": gemm_fn_name(self.gemm_fn, x.device),
            "the shape of hidden_states": tuple(x.shape),
            "the shape of top_k_index": tuple(index.shape),
            "the dtype of hidden_states": str(x.dtype),
            "the dtype of top_k_weights": str(weights.dtype),
            "what needs a gradient": (
                grad and x.requires_grad,
                grad and weights.requires_grad,
                *(grad and p is not None and p.requires_grad for p in parameters.values()),
            ),
        }

    def _compare_over_holders(self, x: Tensor, index: Tensor, weights: Tensor, invariant: bool) -> None:
        """Compares the call over the ranks that hold the same tokens: all ranks, but for experts over data."""
        same = {} if self.sequence_parallel else {"top_k_index": index, "top_k_weights": weights}
        weight = None if self.over_data else self._parameters.get(self.up_name)
        name = f"hidden_states of {self._name}"
        part = part_of_tokens(name, x, self.sequence_dim) if self.sequence_parallel else None
        check_agreement(
            self._facts(x, index, weights, invariant), self.holders, x.device, self._agreed_by_holders, weight,
            self.shards_may_be_equal, part=part, same=same, whole={} if self.over_data else self._whole_parameters(),
        )  # fmt: skip

    # --- over data-parallel ranks -----------------------------------------------------------------------------------

    def _dispatch_over_data(
        self, x: Tensor, index: Tensor, weights: Tensor, sequence_dim: int | None, invariant: bool
    ) -> Dispatch:
        try:
            self._check_readers()
            check_ids(index, self.num_experts, name="top_k_index", rank=self.group.rank)
            if self.holders.size > 1:
                self._compare_over_holders(x, index, weights, invariant)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            self._gather_counts(x, index, weights, invariant, error=error)
            raise

        def gather_counts(counts: Tensor) -> list[list[int]]:
            return self._gather_counts(x, index, weights, invariant, counts)

        return dispatch_over_data(index, self.num_experts, self.group, self.holders, sequence_dim, gather_counts)

    def _gather_counts(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        invariant: bool,
        counts: Tensor | None = None,
        error: Exception | None = None,
    ) -> list[list[int]]:
        """Gathers the numbers of rows for each owner, and compares the call: micro-batches may differ in their tokens.

        Raises:
            RuntimeError: on every rank: ranks make different calls, or one has found an error in its call.
        """
        facts: dict[str, Any] = {"the call": f"the forward of {self._name}, layer {self._agreed.number} of the group"}
        if error is None:
            facts |= self._facts(x, index, weights, invariant)
            facts["the shape of hidden_states"] = self.hidden_size
            facts["the shape of top_k_index"] = ("..", index.shape[-1])
            facts["the ranks of a replica"] = self.holders.size
        if counts is None:
            counts = torch.zeros(self.group.size, dtype=torch.int64, device=x.device)
        layer, call_context.layer = call_context.layer, None
        try:
            table = compare_call(counts, facts, self.group, "expert_parallel_group", error)
            weight = self._parameters.get(self.up_name)
            check_agreement(facts, self.group, x.device, self._agreed, weight, self.shards_may_be_equal)
        finally:
            call_context.layer = layer
        return table

    def _check_readers(self) -> None:
        """Whether all gradients that backward would compute have a MicroBatchTree to go to.

        Raises:
            ValueError: a parameter that none has, or that is computed (a parametrization).
        """
        if not torch.is_grad_enabled():
            return
        for name in self.SHARDED_PARAMETERS:
            p = self._parameters.get(name)
            where = f"{name} of {self._name} on rank {self.group.rank} of expert_parallel_group"
            if p is None:
                raise ValueError(
                    f"{where} is not a parameter (parametrize, prune), which experts over data-parallel ranks need: "
                    "leave that out for them"
                )
            if p.requires_grad and partial_gradients_of(p) is None:
                raise ValueError(
                    f"{where} needs a gradient, and its experts are divided over data-parallel ranks: their gradients "
                    "are partial sums, which data_parallel.MicroBatchTree adds in its order. Make one of "
                    "model.parameters() before this forward, and keep it; or freeze the experts, or use torch.no_grad()"
                )

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.num_experts}, {self.hidden_size}, {self.intermediate_size})"

    def extra_repr(self) -> str:
        text = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        text += f", tp={self.holders.rank}/{self.holders.size}"
        text += f", ep={self.group.rank}/{self.group.size}" if self.over_data else ""
        text += ", by expert" if self.by_expert else ""
        return text + (", sequence_parallel=True" if self.sequence_parallel else "")


def _name_of(activation: str | Activation) -> str:
    return activation if isinstance(activation, str) else identify(activation)


def check_replicas_of(group: Group, experts: Group) -> None:
    """Whether a group for experts has the ranks of the tensor-parallel group, or of several such groups in turn."""
    ranks, wanted = ranks_of(experts), ranks_of(group)
    first = ranks.index(wanted[0]) if wanted[0] in ranks else -1
    if first < 0 or first % group.size or len(ranks) % group.size or ranks[first : first + group.size] != wanted:
        raise ValueError(
            f"expert_parallel_group has the global ranks {ranks} and tp_group {wanted}: it must have the ranks of "
            "tp_group, or those of several replicas (data-parallel ranks), all ranks of each, one replica after another"
        )
