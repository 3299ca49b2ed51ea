"""LoRA by PEFT on this library's layers, with the same bits at every degree: the adapters are layers of this library.

    config = register(LoraConfig(target_modules="all-linear"))
    model = get_peft_model(tpi.parallelize(model, tp_group), config)

For P ranks, rank r of the adapter r_A (its size is no degree's), S pieces as in the base layer's weight:

    base layer     A                                      B
    column         [r_A, K], whole on every rank          [N/P, r_A], its rows sharded as the base's
    row            [r_A, K/P], sharded along K            [N, r_A], whole on every rank
    whole          [r_A, K], whole                        [N, r_A], whole
    embedding      [r_A, V/P], sharded along V            [D, r_A], whole on every rank

A and B of a linear layer are `Linear`s, so that their products go through the gemm_fn and sums over what is sharded
through the owner maps; those of an embedding are looked up and multiplied in the same way. PEFT draws the full A and B,
and each rank takes its part. State dicts have this rank's parts under PEFT's names; PEFT's files have whole tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model_state_dict
from peft.tuners.lora.layer import Embedding
from peft.tuners.lora.layer import Linear as LinearOfPeft
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_module_registration_hook

from ..checkpoint.full_state import (
    WHOLE,
    Entry,
    check_replicas,
    gather_entries,
    model_entries,
    model_group,
    run_on_all_ranks,
)
from ..comm.collectives import Group
from ..consistency.agreement import check_agreement
from ..core.bits import tensor_hash
from ..core.derived_class import derived_class
from ..core.dtensors import is_dtensor, local_of
from ..core.graph_breaks import never_a_frame_of_its_own
from ..core.layout import Stride, shard
from ..functional.regions import gather_sequence
from ..gemm.gemm_fn import GemmFn, gemm
from ..hugging_face.saving import check_whole, groups_of, save_on_rank_0
from ..layers.layernorm_linear import LayerNormLinear
from ..layers.linear import Linear
from ..layers.parameters import ShardedModule, ShardSpec, named_shard_specs
from ..layers.vocab_embedding import VocabParallelEmbedding

_LoraLinear: Any = LinearOfPeft  # whose methods take other arguments in other versions
_LoraEmbedding: Any = Embedding

# --- what of a LoraConfig is supported --------------------------------------------------------------------------------

_SUPPORTED = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "modules_to_save",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias", "init_lora_weights",
    "megatron_core",
})  # fmt: skip
_INITIALISATIONS = (True, False, "gaussian", "orthogonal")  # others read the whole weight, or gradients and activations


def register(config: LoraConfig) -> LoraConfig:
    """Has PEFT use this module's LoRA for `Linear`, `LayerNormLinear` and `VocabParallelEmbedding`; returns `config`.

    Call it on every rank; `get_peft_model` is then a collective, which compares what the ranks have drawn: seed them
    alike. A config that PEFT reads from a file is another object:
    `PeftModel.from_pretrained(model, folder, config=register(LoraConfig.from_pretrained(folder)))`.

    Raises:
        ValueError: another method than LoRA, or an option that is not supported on these layers. Names it.
    """
    check_config(config)
    config._register_custom_module({Linear: LoraLinear, VocabParallelEmbedding: LoraEmbedding})
    return config


def check_config(config: Any) -> None:
    """Whether every option of `config` means the same on shards as on whole layers.

    Raises:
        ValueError: names the option, its value and what is supported.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if type(config) is not LoraConfig:
        raise ValueError(
            f"{type(config).__name__} on rank {rank}: of PEFT's methods LoRA alone is supported on tensor-parallel "
            "layers: give a LoraConfig"
        )
    for field in dataclasses.fields(config):
        make: Any = field.default_factory
        default = make() if field.default is dataclasses.MISSING else field.default
        value = getattr(config, field.name)
        if field.name not in _SUPPORTED and value != default and (value or default):
            made = "" if field.name != "target_parameters" else (
                ". PEFT makes it of target_modules ('all-linear' too) that are experts or a router of transformers: "
                "name the layers of attention and of shared experts there"
            )  # fmt: skip
            raise ValueError(
                f"{field.name}={value!r} of the LoraConfig on rank {rank} is not supported on tensor-parallel layers: "
                f"leave it {default!r}{made}"
            )
    if config.init_lora_weights not in _INITIALISATIONS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} of the LoraConfig on rank {rank} is not supported on "
            f"tensor-parallel layers: choose one of {', '.join(map(repr, _INITIALISATIONS))}; or initialise on the "
            "whole model, save the adapter and the model, and load both"
        )


def _check_drawn(adapter: str, drawn: dict[str, Tensor], group: Group) -> None:
    what = f"adapter {adapter!r} (seed all ranks alike before get_peft_model, and give them the same config)"
    check_replicas(what, {name: Entry(tensor.detach(), WHOLE) for name, tensor in drawn.items()}, group)


# --- what the layers have in common -----------------------------------------------------------------------------------


class _OfShards(nn.Module):
    """What PEFT does to a base layer's parameters, done to this rank's parts of them."""

    # PEFT's own
    base_layer: Any
    get_base_layer: Any
    disable_adapters: Any
    active_adapters: Any
    merged_adapters: Any
    scaling: Any
    r: Any
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    lora_embedding_A: Any
    lora_embedding_B: Any
    _cast_input_dtype: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(_take_parts)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters to this rank's part of the weight; with safe_merge only if all sums are finite.

        Raises:
            ValueError: fully_shard has cut the weight; or, with safe_merge, which is a collective, on every rank: a sum
                is not finite on some rank.
        """
        this: Any = self
        for adapter in check_adapters_to_merge(this, adapter_names):
            changes = list(self._changes(adapter))

            def check(adapter: str = adapter, changes: Any = changes) -> None:
                if not all(bool((parameter + change).isfinite().all()) for parameter, change in changes):
                    raise ValueError(f"the sum of the weight and adapter {adapter!r} is not finite: nothing was merged")

            if safe_merge:
                run_on_all_ranks(self.get_base_layer().group, "merge", check)
            with torch.no_grad():
                for parameter, change in changes:
                    parameter.add_(change)
            if changes:
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Subtracts what `merge` has added, with one more rounding, as PEFT's own layers do."""
        while self.merged_adapters:
            with torch.no_grad():
                for parameter, change in self._changes(self.merged_adapters.pop()):
                    parameter.sub_(change)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What `merge` adds to this rank's part of the weight: a product whose sum is over the adapter's rank alone."""
        base = self.get_base_layer()
        if is_dtensor(base.weight) and base.weight.device_mesh.ndim > 1:
            raise ValueError(
                f"adapter {adapter!r} of a {type(base).__name__} on rank {base.group.rank} cannot be merged after "
                "fully_shard, which has cut it again: merge before, or save the adapter and merge it where it is loaded"
            )
        a, b = self._matrices(adapter)
        product = gemm(self._gemm_fn, a, b, out_dtype=torch.promote_types(a.dtype, torch.float32))
        return product * self.scaling[adapter]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: PEFT would decompose this rank's part of the product."""
        return False

    def _changes(self, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
        """(local tensor of a base parameter, what is added to it)."""
        if self._has(adapter):
            yield local_of(self.get_base_layer().weight), self.get_delta_weight(adapter)

    def _has(self, adapter: str) -> bool:
        raise NotImplementedError

    def _matrices(self, adapter: str) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def _gemm_fn(self) -> GemmFn | None:
        return getattr(self.get_base_layer(), "gemm_fn", None)

    def _adapters_of_call(self, kwargs: dict[str, Any]) -> list[str]:
        """The adapters whose results are added in this call, without PEFT's own arguments in `kwargs`."""
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError(
                f"adapter_names in a call on rank {self.get_base_layer().group.rank}: batches of several adapters are "
                "not supported on tensor-parallel layers: call set_adapter, and the model for each adapter"
            )
        kwargs.pop("alora_offsets", None)
        if self.disable_adapters and self.merged_adapters:
            self.unmerge()
        if self.disable_adapters or self.merged_adapters:
            return []
        return [name for name in self.active_adapters if self._has(name)]


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before a load: this rank's parts in place of whole tensors, which PEFT's files have."""
    for name, parameter, spec in named_shard_specs(module):
        given, local = state_dict.get(prefix + name), local_of(parameter)
        if not isinstance(given, Tensor) or is_dtensor(given):
            continue
        if is_dtensor(parameter) and parameter.device_mesh.ndim > 1:
            continue  # fully_shard has cut it
        if given.shape != Entry(local, spec).full_shape:
            continue
        part = spec.local(given)
        state_dict[prefix + name] = spec.placed(part.to(local.device)) if is_dtensor(parameter) else part


# --- a linear layer ---------------------------------------------------------------------------------------------------


class LoraLinear(_OfShards, _LoraLinear):
    """LoRA of a `Linear`; of a `LayerNormLinear`, of its linear part, whose input is the norm's output."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]  # of the full layer

    def update_layer(self, adapter_name: str, *args: Any, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter: the full one, as PEFT makes it, and then this rank's part of it in its place."""
        check_config(config)
        super().update_layer(adapter_name, *args, config=config, **kwargs)
        base: Linear = self.get_base_layer()
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        numbers = torch.tensor([self.scaling[adapter_name], config.lora_dropout], dtype=torch.float64, device="cpu")
        drawn = {"lora_A": a.weight, "lora_B": b.weight, "scaling and dropout": numbers}
        _check_drawn(adapter_name, drawn, base.group)
        stride: Stride = base.partition_sizes or base.partition_stride
        pieces = {"partition_sizes" if base.partition_sizes else "partition_stride": stride}
        common: dict[str, Any] = dict(
            tp_group=base.group,
            sequence_parallel=base.sequence_parallel,
            sequence_dim=base.sequence_dim,
            gemm_fn=base.gemm_fn,
            owner_map=base.owner_map,
        )
        of_a: dict[str, Any] = {"parallel_mode": None}
        of_b: dict[str, Any] = {"parallel_mode": None}
        if base.parallel_mode == "row":
            of_a = {"parallel_mode": "row", "input_is_parallel": base.input_is_parallel, **pieces}
        elif base.parallel_mode == "column":
            of_b = {"parallel_mode": "column", "gather_output": base.gather_output, **pieces}
        del drawn  # they count as holders of the parameters
        self.lora_A[adapter_name] = Linear.from_linear(a, **of_a, **common)
        self.lora_B[adapter_name] = Linear.from_linear(b, **of_b, **common)
        if config.lora_dropout > 0:
            self.lora_dropout[adapter_name] = Dropout.of_input(config.lora_dropout, base)
            self.lora_A[adapter_name].masks_are_whole = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """y = base(x) + scaling * B(A(dropout(x))) for the active adapters, returned as the base layer does."""
        adapters = self._adapters_of_call(kwargs)
        if not adapters:
            return self.base_layer(x, *args, **kwargs)
        y, rest, x = self._base_output(x, *args, **kwargs)
        dtype = y.dtype
        for name in adapters:
            a, b = self.lora_A[name], self.lora_B[name]
            given = self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype))
            y = y + b(a(given)) * self.scaling[name]
        y = y.to(dtype)
        return (y, *rest) if rest else y

    def _base_output(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None], Tensor]:
        """The base layer's y, what else it returns, and the input of its product."""
        base = self.base_layer
        if not isinstance(base, LayerNormLinear):
            returned = base(x, *args, **kwargs)
            y, *rest = returned if isinstance(returned, tuple) else (returned,)
            return y, rest, x
        returns_norm, gathered = base.return_layernorm_output, base.return_layernorm_output_gathered
        base.return_layernorm_output, base.return_layernorm_output_gathered = True, False
        try:
            y, *rest, normed = base(x, *args, **kwargs)
        finally:
            base.return_layernorm_output, base.return_layernorm_output_gathered = returns_norm, gathered
        if returns_norm:
            whole = gathered and base.sequence_parallel and base.group.size > 1
            rest.append(gather_sequence(normed, base.group, base.sequence_dim) if whole else normed)
        return y, rest, normed

    def _has(self, adapter: str) -> bool:
        return adapter in self.lora_A

    def _matrices(self, adapter: str) -> tuple[Tensor, Tensor]:
        return local_of(self.lora_B[adapter].weight).detach(), local_of(self.lora_A[adapter].weight).detach()

    def _changes(self, adapter: str) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super()._changes(adapter)
        if self._has(adapter) and (bias := self.lora_B[adapter].bias) is not None:
            yield local_of(self.get_base_layer().bias), local_of(bias).detach() * self.scaling[adapter]


class Dropout(nn.Dropout):
    """Dropout of an adapter's input, this rank's part of the mask that the whole input gets.

    Each rank draws the whole mask from torch's generator, whose state must be the same on all ranks of the group: that
    is compared at the first call. With the same state the mask is that of torch's own dropout of the whole on a CPU.

    Args:
        sequence_dim: the token dim that is sharded; None if none is.
        stride: how the features are sharded; None if they are whole.
    """

    def __init__(self, p: float, group: Group, sequence_dim: int | None, stride: Stride | None) -> None:
        super().__init__(p)
        self.group, self.sequence_dim, self.stride = group, sequence_dim, stride
        self._compared = False

    @classmethod
    def of_input(cls, p: float, base: Linear) -> Dropout:
        """Of what `base` takes as input."""
        row = base.parallel_mode == "row"
        stride = base.partition_sizes or base.partition_stride
        sequence_dim = base.sequence_dim if base.sequence_parallel and not row else None
        return cls(p, base.group, sequence_dim, stride if row and base.input_is_parallel else None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self._mask(x) if self.training and self.p > 0 else x

    @torch.compiler.disable(reason="what a compiled program draws is not eager mode's")
    def _mask(self, x: Tensor) -> Tensor:
        group = self.group
        if group.size > 1 and not self._compared:
            state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state(x.device)
            facts = {"the state of torch's generator, for dropout in an adapter": int(tensor_hash(state))}
            check_agreement(facts, group, x.device, set())
            self._compared = True
        shape = list(x.shape)
        if self.sequence_dim is not None:
            shape[self.sequence_dim] *= group.size
        if self.stride is not None:
            shape[-1] *= group.size
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        if self.p < 1:
            mask.div_(1 - self.p)
        if self.sequence_dim is not None:
            mask = mask.chunk(group.size, self.sequence_dim)[group.rank]
        if self.stride is not None:
            mask = shard(mask, dim=-1, rank=group.rank, world=group.size, stride=self.stride)
        return mask


# --- an embedding -----------------------------------------------------------------------------------------------------


class LoraEmbedding(_OfShards, _LoraEmbedding):
    """LoRA of a `VocabParallelEmbedding`. PEFT gives an embedding's adapters no dropout, and so does this."""

    def update_layer(self, adapter_name: str, *args: Any, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter: the full one, as PEFT makes it, and then this rank's part of it in its place."""
        check_config(config)
        base: VocabParallelEmbedding = self.get_base_layer()
        parts = self.lora_embedding_A, self.lora_embedding_B
        if not isinstance(parts[0], AdapterParameters):
            padding = base.shard_spec("weight").padding
            parts = (
                AdapterParameters(ShardSpec(base.group, 1, 1, padding)),
                AdapterParameters(ShardSpec(base.group, None, 1)),
            )
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        super().update_layer(adapter_name, *args, config=config, **kwargs)
        drawn = self.lora_embedding_A[adapter_name], self.lora_embedding_B[adapter_name]
        self.lora_embedding_A, self.lora_embedding_B = parts
        scaling = torch.tensor(self.scaling[adapter_name], dtype=torch.float64, device="cpu")
        names = "lora_embedding_A", "lora_embedding_B", "scaling"
        _check_drawn(adapter_name, dict(zip(names, (*drawn, scaling), strict=True)), base.group)
        for parameters, full in zip(parts, drawn, strict=True):
            parameters[adapter_name] = nn.Parameter(parameters.shard_spec("").local(full), full.requires_grad)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y = base(ids) + scaling * A[:, ids]ᵀ Bᵀ for the active adapters, shaped as the base layer's output."""
        adapters = self._adapters_of_call(kwargs)
        y = self.base_layer(ids, *args, **kwargs)
        dtype, base = y.dtype, self.get_base_layer()
        scale_by = getattr(base, "scale_by", None)  # of an embedding that scales its rows (Gemma's)
        for name in adapters:
            rows, product = self._layers_of(name)
            embedded = functional_call(rows, {"weight": self.lora_embedding_A[name].t()}, (ids,))
            change = functional_call(product, {"weight": self.lora_embedding_B[name]}, (embedded,)) * self.scaling[name]
            if scale_by is not None:
                change = change * local_of(base.weight).new_tensor(scale_by).to(change.dtype)
            y = y + change
        return y.to(dtype)

    def _layers_of(self, adapter: str) -> tuple[VocabParallelEmbedding, Linear]:
        """The layers whose weights the adapter's parameters are; without memory, and no submodules of this module."""
        made: dict[str, Any] = self.__dict__.setdefault("_layers", {})
        if adapter not in made:
            base, r = self.get_base_layer(), self.r[adapter]
            multiple = base.padded_num_embeddings if base.padded_num_embeddings != base.num_embeddings else 1
            common: dict[str, Any] = dict(
                tp_group=dataclasses.replace(base.group, mesh=None),
                sequence_parallel=base.sequence_parallel,
                sequence_dim=base.sequence_dim,
                device="meta",
            )
            rows = VocabParallelEmbedding(
                base.num_embeddings, r, base.padding_idx, pad_vocab_to_multiple_of=multiple, **common
            )
            made[adapter] = rows, Linear(r, base.embedding_dim, bias=False, **common)
        return made[adapter]

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.__dict__.get("_layers", {}).pop(adapter_name, None)

    def _has(self, adapter: str) -> bool:
        return adapter in self.lora_embedding_A

    def _matrices(self, adapter: str) -> tuple[Tensor, Tensor]:
        a, b = self.lora_embedding_A[adapter], self.lora_embedding_B[adapter]
        return local_of(a).detach().t(), local_of(b).detach().t()


class AdapterParameters(ShardedModule, nn.ParameterDict):
    """The parameters of an embedding's adapters, by name: all A, or all B. They say how they are sharded."""

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__()
        self.__dict__["_spec"] = spec  # a ParameterDict's attributes may be adapters

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.__dict__["_spec"].group

    @property
    def SHARDED_PARAMETERS(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.keys())

    def shard_spec(self, name: str) -> ShardSpec:
        return self.__dict__["_spec"]


# --- the whole model --------------------------------------------------------------------------------------------------


class _WholeAdapters(nn.Module):
    """What the class of a PeftModel of sharded layers derives from, before PEFT's own class."""

    def save_pretrained(
        self,
        save_directory: Any,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: Any = "auto",
        is_main_process: bool = True,
        *,
        state_dict: Any = None,
        **kwargs: Any,
    ) -> None:
        """PEFT's save_pretrained, of whole adapters: the files that the same adapters on the whole model would give.

        A collective: call it on every rank. Rank 0 of the job writes; options and errors are as for `save_pretrained`
        of a parallelized model (hugging_face/saving.py).

        Raises:
            ValueError: a state_dict that is given has this rank's parts.
        """
        model, former = cast(Any, self), cast(Any, super())

        def write(state: Any) -> None:
            former.save_pretrained(
                save_directory, safe_serialization, selected_adapters, save_embedding_layers, state_dict=state, **kwargs
            )

        def gather() -> Any:
            adapters = list(model.peft_config) if selected_adapters is None else selected_adapters
            return _whole(model, adapters, save_embedding_layers) if state_dict is None else state_dict

        if groups_of(model):
            if state_dict is not None:
                check_whole(model, state_dict)
            save_on_rank_0(model, save_directory, is_main_process, gather, write)
        elif is_main_process:
            write(gather())


class _CopiedByItself(nn.Module):
    """What the class of a LoraModel of sharded layers derives from, before PEFT's own class: a derived class has a
    `__deepcopy__`, which PEFT's would take from the model inside it."""


@never_a_frame_of_its_own
def _install(owner: nn.Module, name: str, child: nn.Module | None) -> None:
    """A hook of every registration of a submodule: PEFT's models of sharded layers get a class derived from theirs."""
    if not isinstance(owner, (PeftModel, LoraModel, ModulesToSaveWrapper)) or child is None:
        return
    if not any(isinstance(module, ShardedModule) for module in child.modules()):
        return
    if isinstance(owner, ModulesToSaveWrapper):
        if name == "original_module":
            owner.register_load_state_dict_pre_hook(_take_parts)
        return
    added = _CopiedByItself if isinstance(owner, LoraModel) else _WholeAdapters
    if name == ("model" if isinstance(owner, LoraModel) else "base_model") and not isinstance(owner, added):
        owner.__class__ = derived_class(type(owner), added)


register_module_module_registration_hook(_install)


def _whole(model: Any, adapters: list[str], save_embedding_layers: Any) -> dict[str, Tensor]:
    """The whole tensors that PEFT saves for these adapters, under the names of the model's state dict, on one rank."""

    def parts() -> dict[str, Entry]:
        state = model.state_dict(keep_vars=True)
        saved: set[int] = set()
        for adapter in adapters:
            named = get_peft_model_state_dict(
                model, state_dict=state, adapter_name=adapter, save_embedding_layers=save_embedding_layers
            )
            saved |= set(map(id, named.values()))
        entries = model_entries(model)
        return {name: entry for name, entry in entries.items() if id(state[name]) in saved}

    group = model_group(model)
    return gather_entries(run_on_all_ranks(group, "save_pretrained", parts), group, True, True)
