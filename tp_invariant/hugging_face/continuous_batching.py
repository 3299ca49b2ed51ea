"""transformers' continuous batching (`generate_batch`) of parallelized models: what its engine needs of a model.

The engine calls the model with the tokens of many requests one after another, and with a paged cache from which each
layer's attention reads keys and values. The name of the attention decides what the engine prepares: for one that
contains "flash", the lengths of the packed sequences and no mask. So a model's attention has such a name, under which
the same function is registered, while the engine runs with the mode on.

The engine runs on every rank, and each schedules and draws by itself, from the requests that the first rank sends. So
the ranks compare the tokens of every step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.full_state import layers_group
from ..comm.collectives import Group
from ..consistency.agreement import compare_call
from ..core.bits import tensor_hash
from ..core.mode import is_tp_invariant_mode_enabled
from ..functional.attention import attention
from ..layers.linear import Linear

NAME = "tp_invariant"
PREFIX = NAME + "_"
# what an attention is called while the engine runs
ENGINE_NAMES = {NAME: NAME + "_flash", PREFIX + "sdpa": PREFIX + "flash_sdpa", PREFIX + "eager": PREFIX + "flash_eager"}
_ORDINARY_NAMES = {name: ordinary for ordinary, name in ENGINE_NAMES.items()}
_DRAWS = "_tp_invariant_draws"  # of a model while it makes an engine: the processor that draws by keys
_begun: weakref.WeakSet[Any] = weakref.WeakSet()  # engines
_SLIDING = "sliding_attention"  # the engine's name of layers whose cache drops what the window has passed
_FIRST_KEYS = "first_keys"  # an argument that `Steps` adds to the engine's, as it hands its own on to all layers
_ENGINE_ARGUMENTS = (
    "cache", "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", _FIRST_KEYS
)  # fmt: skip


# --- the model ------------------------------------------------------------------------------------------------------


def _configs(model: nn.Module) -> Iterator[Any]:
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    return (config for config in configs.values() if hasattr(config, "_attn_implementation"))


def name_attention(model: nn.Module, names: dict[str, str]) -> None:
    """Gives the attentions of `model` other names."""
    for config in _configs(model):
        if (name := names.get(config._attn_implementation)) is not None:
            config._attn_implementation = name


def as_ordinary(model: Any) -> None:
    """Of calls that are not the engine's."""
    if model.config._attn_implementation in _ORDINARY_NAMES:
        name_attention(model, _ORDINARY_NAMES)


def _runs_here(config: Any) -> bool:
    """Whether this library's attention runs, and not transformers'."""
    return is_tp_invariant_mode_enabled() or config._attn_implementation in (NAME, ENGINE_NAMES[NAME])


def _has_part_of_the_keys(model: nn.Module) -> bool:
    """Whether a layer in an attention, besides those of queries alone, gives this rank's heads."""
    attentions = (module for module in model.modules() if "att" in type(module).__name__.lower())
    layers = (named for module in attentions for named in module.named_modules())
    return any(
        isinstance(layer, Linear) and layer.group.size > 1 and layer.parallel_mode == "column"
        and not layer.gather_output and not name.rpartition(".")[2].startswith("q_")
        for name, layer in layers
    )  # fmt: skip


def begin(model: Any, former: Callable, generation_config: Any, batching_config: Any, **options: Any) -> Any:
    """transformers' init_continuous_batching, `former`, of a parallelized model.

    Raises:
        ValueError: CUDA graphs of several ranks; torch.compile.
    """
    from transformers import ContinuousBatchingConfig

    group, ours = layers_group(model, of_replica=True), _runs_here(model.config)
    as_ordinary(model)
    if ours:
        of_generation = generation_config or model.generation_config
        given = batching_config or getattr(of_generation, "continuous_batching_config", None)
        batching_config = _checked(copy.deepcopy(given or ContinuousBatchingConfig()), group)
        name_attention(model, ENGINE_NAMES)
    else:
        name_attention(model, {PREFIX + name: name for name in ("sdpa", "eager")})
    seen = {}
    if group.size > 1:  # what the engine goes by, in its constructor
        seen = {"_device_mesh": _mesh_of(model, group), "_tp_plan": _plan(model)}
    before = {name: vars(model)[name] for name in seen if name in vars(model)}
    vars(model).update(seen)
    try:
        manager = former(generation_config=generation_config, continuous_batching_config=batching_config, **options)
    finally:
        for name in seen:
            del vars(model)[name]
        vars(model).update(before)
    draws = vars(model).get(_DRAWS)
    if draws is not None and manager not in _begun:  # an engine that goes on has its own
        _add_draws(manager, draws)
    _begun.add(manager)
    return manager


def _add_draws(manager: Any, draws: Any) -> None:
    """Makes `draws` the new engine's only processor. Raises: ValueError: there are others, or CUDA graphs."""
    processors = manager.logit_processor
    if manager.continuous_batching_config.use_cuda_graph not in (False, None, (False, False)):
        raise ValueError("use_cuda_graph with KeyedDraws, which wait for the GPU in every step: leave it out")
    if processors.do_processing:
        names = ", ".join(type(p).__name__ for p in processors.logits_processor)
        raise ValueError(
            f"generation_config asks for {names} beside KeyedDraws: give it temperature=1.0, top_k=0, top_p=1.0 and no "
            "penalties, and give temperature, top_k and top_p to KeyedDraws"
        )
    processors.logits_processor.append(draws)
    processors.tensors_required, processors.do_processing = 1, True


def serve_keyed(
    model: Any, draws: Any, inputs: Sequence[Any], generation_config: Any, batching_config: Any, **options: Any
) -> dict[str, Any]:
    """transformers' generate_batch with requests that are drawn by keys: {the engine's name: its result}, in order."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    names, own, texts_of = draws.for_engine()
    if len(names) != len(inputs):
        raise ValueError(
            f"KeyedDraws has {len(names)} requests, and generate_batch {len(inputs)} prompts: give as many"
        )
    config = generation_config or model.generation_config
    copies = config.num_return_sequences or 1
    max_new = options.pop("max_new_tokens", None) or config.max_new_tokens
    record, _ = options.pop("record_timestamps", False), options.pop("progress_bar", None)
    # for the size of the cache, as transformers' own generate_batch
    options["workload_hints"] = WorkloadHints(
        max_prompt_length=max(map(len, inputs)), max_generated_length=max_new or 0, num_requests=copies * len(names)
    )
    vars(model)[_DRAWS] = own
    try:
        running = model.continuous_batching_context_manager(
            generation_config=generation_config, continuous_batching_config=batching_config, timeout=5, **options
        )
        found: dict[str, Any] = {}
        with running as manager:
            processor = next((p for p in manager.logit_processor.logits_processor if type(p) is type(own)), None)
            if processor is None or vars(processor.draws) != vars(own.draws):
                raise ValueError(
                    "this engine (persistent_manager=True) was made without KeyedDraws, or with other options of it: "
                    "give each call the same seed, temperature, top_k, top_p and min_p, or stop the engine before"
                )
            for name, prompt in zip(names, inputs, strict=True):
                manager.add_request(
                    [*prompt], request_id=name, max_new_tokens=max_new, record_timestamps=record,
                    eos_token_id=config.eos_token_id if config.eos_token_id is not None else -1,
                )  # fmt: skip
            while len(found) < copies * len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif result is None and not manager.is_running():
                    break
            for name, result in found.items():
                written = len(result.generated_tokens)  # the engine may have drawn one more
                result.logprobs = processor.log_probs_of(name)[:written]
    finally:
        del vars(model)[_DRAWS]
    wanted = [text for name in names for text in texts_of(name, copies)]
    if missing := [name for name in wanted if name not in found]:
        raise RuntimeError(f"the engine stopped before {len(missing)} of {len(wanted)} texts, {missing[0]} among them")
    return {name: found[name] for name in wanted}


def _checked(config: Any, group: Group) -> Any:
    for name in ("varlen_compile_config", "decode_compile_config"):
        if getattr(config, name, None) is not None:
            raise ValueError(
                f"{name} is given: continuous batching of a parallelized model is not compiled; leave it out"
            )
    graphs = config.use_cuda_graph or config.q_padding_interval_size or config.kv_padding_interval_size
    if graphs and graphs != (False, False) and group.size > 1:
        raise ValueError(
            f"use_cuda_graph={config.use_cuda_graph} with padding intervals {config.q_padding_interval_size} and "
            f"{config.kv_padding_interval_size}: continuous batching over {group.size} ranks takes no CUDA graphs, "
            "since the ranks compare every step; leave them out"
        )
    if not graphs:
        config.use_cuda_graph = False  # else the engine captures graphs where it can
    return config


def _mesh_of(model: Any, group: Group) -> DeviceMesh:
    """The engine's: a mesh of one dim, whose name it knows."""
    assert group.process_group is not None
    return DeviceMesh.from_group(group.process_group, model.device.type, mesh_dim_names=("tp",))


def _plan(model: Any) -> dict[str, str]:
    """A plan that says whether the keys' heads are sharded, which is all that the engine reads from it."""
    if not _has_part_of_the_keys(model):
        return {}
    return {f"layers.*.self_attn.{name}": "colwise" for name in ("k_proj", "v_proj")}


class Steps:
    """A forward pre-hook of a model that can generate: prepares calls of the engine, and undoes it for others."""

    def __init__(self) -> None:
        self._cache_id, self._group = 0, Group(None, 0, 1)

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        cache = kwargs.get("cache")
        if not is_paged(cache):
            as_ordinary(model)
            return None
        if not _runs_here(model.config):
            return None
        name_attention(model, ENGINE_NAMES)
        if self._cache_id != id(cache):
            self._cache_id, self._group = id(cache), layers_group(model, of_replica=True)
        if self._group.size > 1:
            _compare(kwargs, self._group)
        cu_k = kwargs["cu_seq_lens_k"].get(_SLIDING)
        if cu_k is not None:
            kwargs = kwargs | {_FIRST_KEYS: _first_keys(kwargs["position_ids"], kwargs["cu_seq_lens_q"], cu_k)}
        return args, kwargs


def _compare(kwargs: dict[str, Any], group: Group) -> None:
    tensors = [kwargs[name].flatten() for name in ("input_ids", "position_ids", "cu_seq_lens_q")]
    facts = {"the call": "a step of continuous batching", "the shapes": [tuple(x.shape) for x in tensors]}
    hashes = compare_call(tensor_hash(torch.cat(tensors)).view(1), facts, group, "tp_group")
    if len({value for (value,) in hashes}) > 1:
        raise RuntimeError(
            f"the {group.size} ranks of tp_group have different tokens or requests in a step of continuous batching. "
            "Each rank draws by itself, from torch's random numbers, which the engine seeds alike: draw no others "
            "while it runs, on no rank"
        )


def _first_keys(position_ids: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """int32 [sequences]: the position of the first key that each sequence's cache has."""
    queries = cu_q.diff()
    first_queries = position_ids.flatten()[cu_q[:-1].clamp(max=position_ids.numel() - 1).long()]
    return torch.where(queries > 0, first_queries + queries - cu_k.diff(), 0).int()


# --- its attention --------------------------------------------------------------------------------------------------


class Paged(NamedTuple):
    """Keys and values of a step, [1, kv, keys, D], and attention's options for its packed sequences."""

    key: Tensor
    value: Tensor
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    window: int | None
    first_keys: Tensor | None

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """query [1, h, queries, D] -> [1, h, queries, D]."""
        cu_q, cu_k, longest_k, first_keys = self.cu_q, self.cu_k, self.longest_k, self.first_keys
        queries, keys = query.shape[2], self.key.shape[2]
        if self.longest_q == queries:  # padding at the end, as for a CUDA graph, is a sequence of its own; else empty
            cu_q, cu_k, longest_k = F.pad(cu_q, (0, 1), value=queries), F.pad(cu_k, (0, 1), value=keys), keys
            first_keys = None if first_keys is None else F.pad(first_keys, (0, 1))
        return attention(
            query,
            self.key,
            self.value,
            causal=True,
            window=self.window,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=self.longest_q,
            max_seqlen_k=longest_k,
            first_key=0 if first_keys is None else first_keys,
            **options,
        )


def is_paged(cache: Any) -> bool:
    if cache is None:
        return False
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    return isinstance(cache, PagedAttentionCache)


def read_cache(module: Any, key: Tensor, value: Tensor, given: dict[str, Any]) -> Paged:
    """Writes a step's keys and values to the engine's cache and reads those of its sequences.

    given: an attention function's other arguments, from which it takes the engine's own.
    """
    cache, first_keys = given["cache"], given.get(_FIRST_KEYS)
    if given.get("block_table") is not None:
        raise ValueError(
            "the engine passes a block_table, which tpi.attention does not take: set max_blocks_per_request=0"
        )
    layer, window = module.layer_idx, given.get("sliding_window")
    allocator = cache.layer_to_allocator[layer]
    sliding, held = allocator.layer_type == _SLIDING, (allocator.num_key_value_heads, allocator.head_dim)
    for x in (key, value):
        if (x.shape[1], x.shape[3]) != held:
            raise ValueError(
                f"{type(module).__name__} has {x.shape[1]} heads of size {x.shape[3]} in keys or values, and the "
                f"engine's cache {held[0]} of size {held[1]}, as for latent attention: use generate for this model"
            )
    if sliding and not (window and first_keys is not None):
        raise ValueError(
            f"{type(module).__name__} passes sliding_window={window} in layer {layer}, whose cache drops what a window "
            "has passed: without it the values would be others than the model means"
        )
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=given)
    for name in _ENGINE_ARGUMENTS:
        given.pop(name, None)
    return Paged(
        key, value, given["cu_seq_lens_q"].int(), given["cu_seq_lens_k"], given["max_length_q"], given["max_length_k"],
        window or None, first_keys if sliding else None,
    )  # fmt: skip
