"""What parallelize replaces in a Hugging Face model besides its modules: its attention function and its loss.

Both are looked up at every call, so that the mode decides: with the mode on this library's run, with the mode off the
previous ones. `register_attention` also registers the attention with transformers under its own name, for models that
use nothing else of this library; under that name it runs with the mode on and off.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.derived_class import derived_class
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.module_hooks import with_key
from ..functional.attention_choice import refuse_dropout, safe_attention, stock_sdpa, torchs_attention
from ..functional.context_parallel import share_call_error
from ..functional.cross_entropy import vocab_parallel_cross_entropy
from ..layers.linear import Linear
from .continuous_batching import ENGINE_NAMES, NAME, Steps, is_paged, read_cache
from .continuous_batching import PREFIX as _PREFIX
from .generation import Generating
from .masks import Packing, VisibleKeys, attend, visible_keys
from .saving import install_saving

_REPLACED = ("sdpa", "eager")
SAFE_IMPLEMENTATIONS = (*_REPLACED, NAME)
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # transformers' FlashAttentionKwargs
_SHARED = ("torch", "transformers", NAME)  # packages whose other modules are no one model's
# Other arguments that models pass to an attention function and that it does not need: the mask contains the same
# information, or they are for other functions.
_IGNORED_ARGUMENTS = {
    *_PACKED, "sliding_window", "position_ids", "cache_position", "use_cache", "seq_idx", "token_type_ids",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "deterministic",
}  # fmt: skip


def config_values(config: Any, name: str) -> frozenset[int]:
    """The integer values of `name` in a config, or in the configs of its layers; empty if there is no such field.

    If a field differs between layers, transformers raises an error when it is read from the model's config.
    """
    try:
        values = [getattr(config, name, None)]
    except Exception:
        values = [getattr(layer, name, None) for layer in getattr(config, "per_layer_config", ())]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def problem_with(config: Any, model: nn.Module) -> str | None:
    """The problem with the attention that a Hugging Face model's config selects, None if there is none."""
    import transformers.masking_utils

    if not hasattr(transformers.masking_utils, "bidirectional_mask_function"):  # see masks.py
        return (
            f"transformers {transformers.__version__} describes the masks of attention otherwise than 5.0 and later "
            "versions do (it has no masking_utils.bidirectional_mask_function): install transformers>=5.0"
        )
    given = (config._attn_implementation or "sdpa").removeprefix(_PREFIX)
    if given not in SAFE_IMPLEMENTATIONS:
        return (
            f"attn_implementation={given!r} may give a head other bits when fewer heads are in the call: choose one of "
            f"{', '.join(map(repr, SAFE_IMPLEMENTATIONS))}, in whose place tpi.attention runs while the mode is on"
        )
    for file in _modeling_files(model):
        if given in _compared_names(file):
            return (
                f"attn_implementation={given!r}: {file} does other things for this name than for others, and would not "
                "know it again under the name that parallelize gives it, where the mode decides at every call"
            )
        if own := _own_attentions(model, file):
            return (
                f"{', '.join(own)} in {file}: an attention of its own, which asks neither transformers nor SDPA for "
                "one: none can take its place, and a head's bits may depend on how many are in the call. Give a plan "
                "that shards other layers alone, or leave this model to the stock path"
            )
    return None


def _own_attentions(model: nn.Module, file: str) -> list[str]:
    """Classes of attention in `model` from a file of transformers that reaches for no attention function at all.

    By name, as transformers itself tells whether a model's attention can be set. Not for other packages' files, which
    may reach for one in another file.
    """
    if not file.startswith("transformers.models."):
        return []
    classes = {cls.__name__ for module in model.modules() if (cls := type(module)).__module__ == file}
    found = sorted(name for name in classes if "Attention" in name)
    source = _source_of(file) if found else ""
    reaches = source is None or "ALL_ATTENTION_FUNCTIONS" in source or "scaled_dot_product_attention" in source
    return [] if reaches else found


def _modeling_files(model: nn.Module) -> set[str]:
    """Names of the Python modules that the parts of a model are written in, without what transformers' models share."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__module__ for cls in classes if issubclass(cls, nn.Module)}
    return {name for name in names if name.startswith("transformers.models.") or name.split(".")[0] not in _SHARED}


def _source_of(module_name: str) -> str | None:
    """The source text of a Python module; None of one typed in at a prompt, or unpickled where nobody imported it."""
    try:
        return inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return None


@functools.cache
def _compared_names(module_name: str) -> frozenset[str]:
    """Names of attentions that the source compares a model's with, other than to look its function up.

    transformers has no way to run another function under "sdpa" or "eager" in one model alone, so that parallelize has
    to give these new names; in a few models (MiniMax-M3, Falcon, GLM-5, GPT-2's "eager") more hangs on the old ones.
    """
    source = _source_of(module_name)
    if source is None:
        return frozenset()
    tree = ast.parse(source)
    lookups = {
        id(node.test)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and any("ALL_ATTENTION_FUNCTIONS" in ast.unparse(line) for line in node.body)
    }
    names: set[Any] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and id(node) not in lookups:
            sides = (node.left, *node.comparators)
            if any(isinstance(x, (ast.Name, ast.Attribute)) and "attn_impl" in ast.unparse(x) for x in sides):
                names |= {x.value for side in sides for x in ast.walk(side) if isinstance(x, ast.Constant)}
    return frozenset(names & set(_REPLACED))


def register_attention() -> None:
    """Makes `attn_implementation="tp_invariant"` known to transformers: tpi.attention, with the mode on or off.

        tpi.hugging_face.register_attention()
        model = AutoModelForCausalLM.from_pretrained(.., attn_implementation="tp_invariant")

    Causal and full attention, sliding windows, softcaps, sinks (gpt-oss); padding on either side is left out, so that a
    sequence has the bits that it has alone; packed sequences by position_ids or transformers' cu_seq_lens_q, ..;
    caches, static ones too, for a query or a chunk at a time. A row of logits then has the same bits in a prefill and
    in decoding, if all else in the model is invariant too (`parallelize`), also with a cache that drops what a sliding
    window has passed. Masks of other kinds are taken as a
    matrix (`mask` of tpi.attention).

    torch.compile breaks the graph where the model makes its masks, which are no tensors; fullgraph=True is an error.
    A model that asks transformers for neither mask nor attention (DeBERTa) runs its own, whatever the name: nothing
    of this library is called then that could say so. `parallelize` refuses such models.

    Dropout of attention weights, in training, is torch's own attention, for modules of which a rank has all heads.

    Raises (at a forward):
        ValueError: dropout where a rank has a part of the heads; output_attentions, which nothing has; a window without
            a mask that would say where it stands; and whatever else a model hands its attention that this one does not
            know: position biases, chosen blocks or indices.
        NotImplementedError, AttributeError: a model that computes with its mask (GPT-J, Bloom).
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for original in _REPLACED:
        for name in (_PREFIX + original, ENGINE_NAMES[_PREFIX + original]):
            AttentionInterface.register(name, _HuggingFace(original))
        AttentionMaskInterface.register(_PREFIX + original, _Mask(ALL_MASK_ATTENTION_FUNCTIONS[original], True))
    for name in (NAME, ENGINE_NAMES[NAME]):  # under the engine's names transformers makes no mask
        AttentionInterface.register(name, _HuggingFace(None))
    AttentionMaskInterface.register(NAME, _Mask(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], False))


def install(model: Any, attention_stays: bool = False) -> None:
    """Makes `model` use this library's attention while the mode is on, and an invariant causal-LM loss.

    Args:
        attention_stays: the model's own attention runs, as every rank has all heads.

    Raises:
        ValueError: a model that parallelize refuses (`problem_with`); or at its next forward with the mode on, if its
            attention is changed to such a one; or at a forward that is asked for attention weights which it cannot
            give (`_refuse_attentions`).
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    modules = [m for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
    configs = list({id(m.config): m.config for m in modules}.values())
    for config in configs if not attention_stays else ():
        if problem := problem_with(config, model):
            raise ValueError(problem)
    register_attention()
    for config in configs if not attention_stays else ():
        if config._attn_implementation in (None, *_REPLACED):
            config._attn_implementation = _PREFIX + (config._attn_implementation or "sdpa")
    for module in modules:  # each looks its attention up in its config, and any may be called by itself
        if not attention_stays:
            with_key(module.register_forward_pre_hook(_keep_safe), "keep_safe")
        if isinstance(module, PreTrainedModel):
            with_key(module.register_forward_pre_hook(_refuse_attentions, with_kwargs=True), "refuse_attentions")
            if hasattr(module, "generate") and not isinstance(module, Generating):
                module.__class__ = derived_class(type(module), Generating)
                with_key(module.register_forward_pre_hook(Steps(), with_kwargs=True), "continuous_batching")
            install_saving(module)
    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = CausalLMLoss(model.get_output_embeddings())


def _keep_safe(module: Any, args: Any) -> None:
    """Restores our attention if another one was selected since: "sdpa" and "eager" select ours again."""
    config = module.config
    asked = config._attn_implementation
    if asked is not None and asked.startswith(NAME):
        return
    if problem := problem_with(config, module):
        if is_tp_invariant_mode_enabled():
            raise ValueError(problem)
    elif asked in _REPLACED:
        config._attn_implementation = _PREFIX + asked


def _refuse_attentions(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises if transformers would return no attention weights, (), or those of this rank's heads only.

    Raises:
        ValueError: output_attentions, unless each rank has all heads, and the attention is "eager".
    """
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(module.config, "output_attentions", None)
    if not asked:
        return
    begin = f"{type(module).__name__} is asked for output_attentions={asked}: "
    if any(_has_part_of_the_heads(child) for child in module.modules() if is_attention(child)):
        raise ValueError(begin + "a rank has the weights of its own heads only; turn it off")
    implementation = (module.config._attn_implementation or "").removeprefix(_PREFIX)
    if implementation != "eager":
        raise ValueError(
            begin + f"attn_implementation={implementation!r} has no weights to give; turn it off, or choose 'eager'"
        )


class _Mask:
    """A function of transformers' mask interface: VisibleKeys if the mask is recognised, else original's mask, and with
    it the position of the first key of a cache that has dropped others."""

    def __init__(self, original: Callable, only_in_mode: bool) -> None:
        self.original, self.only_in_mode = original, only_in_mode

    def __call__(self, **asked: Any) -> Any:
        if isinstance(asked.get("attention_mask"), VisibleKeys):  # generate has made it, for a static cache
            return asked["attention_mask"]
        if self.only_in_mode and not is_tp_invariant_mode_enabled():
            return self.original(**asked)
        visible, dropped = visible_keys(**asked), int(asked.get("kv_offset") or 0)
        if visible is not None:
            return replace(visible, as_matrix=functools.partial(self.original, **asked))
        if not dropped:
            return self.original(**asked)
        matrix, keys = self.original(**asked | dict(allow_is_causal_skip=False)), asked["kv_length"]
        return VisibleKeys(False, None, keys, None, dropped, keys, matrix, lambda: matrix)


class _HuggingFace:
    """A function of transformers' attention interface: query [B, h, S, D], key, value [B, kv, T, D] -> [B, S, h, D].

    original: what runs while the mode is off; None: the same as while it is on.
    """

    def __init__(self, original: str | None) -> None:
        self.original = original

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | VisibleKeys | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """s_aux: the sinks of this rank's heads, [h].

        With context parallelism over module.context_parallel_group, a Group, q, k and v are of this rank's tokens.
        """
        cp_group = getattr(module, "context_parallel_group", None)
        if cp_group is not None and cp_group.size == 1:
            cp_group = None
        if self.original is not None and not is_tp_invariant_mode_enabled():
            if isinstance(attention_mask, VisibleKeys):
                raise RuntimeError(
                    "the TP-invariant mode was turned off inside a forward: keep it the same for all of it"
                )
            given = dict(dropout=dropout, scaling=scaling, is_causal=is_causal, softcap=softcap, s_aux=s_aux, **others)
            given = {name: value for name, value in given.items() if value is not None}
            if cp_group is not None:
                return _stock_of_parts(cp_group, module, query, key, value, attention_mask, **given)
            return self._stock(module)(module, query, key, value, attention_mask, **given)
        paged = read_cache(module, key, value, others) if is_paged(others.get("cache")) else None
        others.setdefault("output_attentions", getattr(getattr(module, "config", None), "output_attentions", None))
        unknown = {
            name: passed for name, passed in others.items()
            if passed is not None and passed is not False and name not in _IGNORED_ARGUMENTS
        }  # fmt: skip
        whole = not _has_part_of_the_heads(module) and all(others.get(name) is None for name in _PACKED)
        if whole and cp_group is None and (dropout or (unknown and self.original is not None)):
            if isinstance(attention_mask, VisibleKeys):
                if attention_mask.as_matrix is None:
                    raise RuntimeError(
                        f"{type(module).__name__} has dropout={dropout} or other arguments of transformers' own "
                        "attention in a captured layer, which has no mask for it; run the layer without graph_layers"
                    )
                attention_mask = attention_mask.as_matrix()
            given = dict(scaling=scaling, is_causal=is_causal, softcap=softcap, s_aux=s_aux, **others)
            given = {name: value for name, value in given.items() if value is not None}
            with torchs_attention():
                return self._stock(module)(module, query, key, value, attention_mask, dropout=dropout, **given)
        if dropout:
            refuse_dropout(dropout, f"attention dropout of {type(module).__name__}")
        for name, passed in unknown.items():
            if name == "output_attentions":
                raise ValueError(
                    f"{type(module).__name__} is asked for output_attentions={passed}: tpi.attention has no weights to "
                    "give; turn it off, or the TP-invariant mode"
                )
            raise ValueError(
                f"{type(module).__name__} passes {name}, which tpi.attention does not take: without it the values "
                "would be others than the model means"
            )
        options: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux)
        if cp_group is not None:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            mask = (
                VisibleKeys(causal, others.get("sliding_window"), key.shape[2], None)
                if attention_mask is None
                else attention_mask
            )
            visible = _of_whole_sequences(cp_group, module, query, mask if paged is None else None, others)
            out = attend(query, key, value, visible, cp_group=cp_group, **options)
        elif paged is not None:
            out = paged.attend(query, **options)
        elif isinstance(attention_mask, VisibleKeys):
            out = attend(query, key, value, _with_packing(attention_mask, others), **options)
        elif any(others.get(name) is not None for name in _PACKED):
            raise ValueError(
                f"{type(module).__name__} passes cu_seq_lens_.. with a mask that is not causal, full or sliding alone: "
                "packed sequences take no other"
            )
        elif attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[2]]
            out = safe_attention(query, key, value, attn_mask=attention_mask, enable_gqa=True, **options)
        else:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            window = others.get("sliding_window")
            out = _without_mask(module, query, key, value, causal, window, **options)
        return out.transpose(1, 2).contiguous(), None

    def _stock(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        if self.original == "eager":  # each model file has its own
            for cls in type(module).__mro__:
                eager = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
                if eager is not None:
                    return eager
            raise NotImplementedError(f"{type(module).__name__} has no eager_attention_forward beside it")
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS[self.original or "sdpa"]


def is_attention(module: nn.Module) -> bool:
    """By the name of its class."""
    return "att" in type(module).__name__.lower()


def _has_part_of_the_heads(attention: nn.Module) -> bool:
    linears = [module for module in attention.modules() if isinstance(module, Linear) and module.group.size > 1]
    return any(linear.parallel_mode == "column" and not linear.gather_output for linear in linears)


def _without_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None, **options: Any
) -> Tensor:
    """For a module that asked for no mask; as transformers reads it: a single token sees all that its window leaves."""
    queries, keys = query.shape[2], key.shape[2]
    if not window or keys <= window:
        return safe_attention(query, key, value, is_causal=causal and queries > 1, enable_gqa=True, **options)
    if not causal or queries not in (1, keys):
        raise ValueError(
            f"{type(module).__name__} passes sliding_window={window} and no mask, with causal={causal}, {queries} "
            f"queries and {keys} keys: it is clear what a query sees only where causal is True, for one query or as "
            "many as keys. Have the model make its mask (transformers.masking_utils)"
        )
    return attend(query, key, value, VisibleKeys(True, window, keys, None), **options)


def _with_packing(visible: VisibleKeys, given: dict[str, Any]) -> VisibleKeys:
    """`visible` with the packed sequences that the caller passes, if any."""
    cu_q, cu_k, longest_q, longest_k = (given.get(name) for name in _PACKED)
    if cu_q is None and cu_k is None:
        return visible
    padded = visible.matrix is not None or (visible.packing is not None and visible.packing.k_rows is not None)
    if cu_q is None or cu_k is None or padded:
        raise ValueError("packed sequences need both cu_seq_lens_q and cu_seq_lens_k, and no padding mask beside them")
    packing = Packing(None, None, cu_q.int(), cu_k.int(), longest_q or 0, longest_k or 0)
    return replace(visible, packing=packing)


def _of_whole_sequences(
    group: Group, module: nn.Module, query: Tensor, mask: Any, given: dict[str, Any]
) -> VisibleKeys:
    """What the mask that a model has made for this rank's part of the tokens says of the whole sequences.

    A part is as long as its keys, so that transformers makes the mask of a sequence that begins there, causal or with a
    window, whatever its first position.

    Raises:
        ValueError: a mask that is not the same for every part; on every rank, at the first call.
    """
    packed = all(given.get(name) is not None for name in _PACKED[:2])
    if not isinstance(mask, VisibleKeys):
        problem = "a mask that is not causal, full or sliding alone, or pages of keys"
    elif torch.is_grad_enabled() and hasattr(module, "kv_a_proj_with_mqa"):
        # torch adds the gradient of the keys that all heads share in an order that depends on the number of tokens
        problem = "latent attention, and gradients are computed,"
    elif mask.matrix is not None or mask.first:
        problem = "a cache of keys"
    elif mask.packing is not None and (mask.packing.q_rows is not None or mask.packing.k_rows is not None):
        problem = "a mask with padding"
    elif mask.packing is not None and not packed:
        problem = "packed sequences by position_ids alone"
    elif packed and query.shape[0] > 1:
        problem = f"packed sequences in {query.shape[0]} rows"
    else:
        return _with_packing(mask, given)
    error = ValueError(
        f"{type(module).__name__} has {problem} on rank {group.rank} of its cp_group: context parallelism takes "
        "causal, full and sliding attention of whole rows, and packed sequences in one row, by cu_seq_lens_q and "
        "cu_seq_lens_k of the whole row, the same on every rank"
    )
    share_call_error(error, group, query)
    raise error


def _stock_of_parts(
    group: Group, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """With context parallelism and the mode off: torch's SDPA between the exchanges.

    Raises:
        ValueError: anything but causal and full attention; on every rank, at the first call.
    """
    window, tokens = others.get("sliding_window"), query.shape[2] * group.size
    given = [name for name in ("softcap", "s_aux", *_PACKED) if others.get(name) is not None]
    if mask is not None or given or (window and window < tokens):
        error = ValueError(
            f"{type(module).__name__} has {', '.join(given) or 'a mask or a window'} on rank {group.rank} of its "
            "cp_group, and the TP-invariant mode is off: context parallelism then takes causal and full attention of "
            "attn_implementation='sdpa' alone; turn the mode on"
        )
        share_call_error(error, group, query)
        raise error
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = dict(dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True)
    out = stock_sdpa(query, key, value, cp_group=group, **options)
    return out.transpose(1, 2).contiguous(), None


class CausalLMLoss:
    """transformers' ForCausalLMLoss: in fp32; with the mode on, by this library's cross-entropy.

    logits [B, S, V], or [B, S, V/P] of an output layer whose plan is "colwise", which gathers nothing.
    """

    def __init__(self, output_layer: Any) -> None:
        self.output_layer = output_layer

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        head = self.output_layer
        sharded = isinstance(head, Linear) and head.parallel_mode == "column" and not head.gather_output
        if not is_tp_invariant_mode_enabled() and not sharded:
            from transformers.loss.loss_utils import ForCausalLMLoss

            stock: Any = ForCausalLMLoss
            return stock(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits.flatten(0, -2),
            shift_labels.reshape(-1).to(logits.device),
            tp_group=head.group if sharded else None,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch
