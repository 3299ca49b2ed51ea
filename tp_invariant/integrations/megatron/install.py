"""install() and uninstall(): this package's modules in the places where Megatron constructs its own.

Megatron's models construct their embedding, output layer and loss by name, and its training loop calls its own
finalize_model_grads and gradient norm. So install() replaces attributes of Megatron's modules and classes, and of no
other program's. `replaced()` lists them, and uninstall() puts the former ones back.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel as MegatronGPTModel
from torch import Tensor, nn

from . import gradients, modules, spec
from .checks import check_config, check_model, padded_vocab_size
from .versions import HAS_HYBRID

_CORE = "megatron.core."
_former: list[tuple[Any, str, Any]] = []  # (owner, name, what was there), in the order of replacement


def _loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """LanguageModule.compute_language_model_loss: labels [b, s], logits [s, b, V/P] -> [b, s]."""
    loss = modules.vocab_parallel_cross_entropy(logits, labels.t().contiguous(), tp_group=self.pg_collection.tp)
    return loss.t().contiguous()


def _padded(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
    """Megatron's vocab_size_with_padding, at every degree the same."""
    return padded_vocab_size(orig_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def _padded_by_builder(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int, logging_enabled: bool = True
) -> int:
    """Megatron's calculate_padded_vocab_size, at every degree the same."""
    return padded_vocab_size(vocab_size, make_vocab_size_divisible_by, tensor_model_parallel_size)


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    """A model's constructor, with the checks of its configuration before, and of its modules and masks after."""

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(config)
        original(self, config, *args, **kwargs)
        check_model(self)
        self.register_forward_pre_hook(modules.without_causal_mask, with_kwargs=True)

    return construct


def _fused_in_module(original: Callable[..., None]) -> Callable[..., None]:
    """MLP's constructor which calls an activation module: that of its submodules, of which Megatron's local specs have
    none, or else GatedActivation."""

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, modules.with_activation_module(config), *args, **kwargs)
        if not isinstance(self.activation_func, nn.Module):
            self.activation_func = modules.GatedActivation(config=self.config)

    return construct


def _of_models() -> list[tuple[str, str | None, str, Any]]:
    """(module, class in it or None, attribute, replacement) of what models are made of."""
    provider = spec.SpecProvider
    names = (
        "column_parallel_linear", "row_parallel_linear", "fuse_layernorm_and_linear",
        "column_parallel_layer_norm_linear", "layer_norm", "core_attention", "activation_func", "grouped_mlp_modules",
    )  # fmt: skip
    fused = ("fuse_layernorm_and_linear", "column_parallel_layer_norm_linear")
    engine = "extensions.transformer_engine_spec_provider"  # Megatron imports it without Transformer Engine, too
    places: list[tuple[str, str | None, str, Any]] = [
        ("tensor_parallel", None, "ColumnParallelLinear", modules.ColumnParallelLinear),
        ("tensor_parallel", None, "VocabParallelEmbedding", modules.VocabParallelEmbedding),
        ("tensor_parallel", None, "vocab_parallel_cross_entropy", modules.vocab_parallel_cross_entropy),
        ("models.common.language_module.language_module", "LanguageModule", "compute_language_model_loss", _loss),
        ("transformer.transformer_block", None, "LayerNormImpl", modules.Norm),
        ("models.gpt.gpt_layer_specs", None, "LNImpl", modules.Norm),
        *(
            ("models.backends", "LocalSpecProvider", name, getattr(provider, name))
            for name in names
            if name not in fused
        ),
        # not grouped_mlp_modules, which Megatron calls when it is imported
        *((engine, "TESpecProvider", name, getattr(provider, name)) for name in names[:-1]),
        ("transformer.mlp", "MLP", "__init__", _fused_in_module),
        ("models.gpt.gpt_model", "GPTModel", "__init__", _checked),
    ]
    if hasattr(gpt_layer_specs, "TENorm"):  # the norm after the last layer
        places.append(("models.gpt.gpt_layer_specs", None, "TENorm", modules.Norm))
    if HAS_HYBRID:
        places += [
            ("tokenizers.utils.build_tokenizer", None, "vocab_size_with_padding", _padded),
            ("models.hybrid.hybrid_block", None, "TENorm", modules.Norm),
            ("models.hybrid.hybrid_layer_specs", None, "hybrid_stack_spec", spec.hybrid_stack_spec()),
            ("models.hybrid.hybrid_model", "HybridModel", "__init__", _checked),
        ]
    return places


def _of_training() -> list[tuple[str, str | None, str, Any]]:
    """The same of what acts on gradients."""
    buckets = "distributed.param_and_grad_buffer"
    reduce = "_allreduce_non_tensor_model_parallel_grads"
    return [
        ("distributed.finalize_model_grads", None, reduce, gradients.without_complete_gradients),
        (buckets, "_ParamAndGradBucketGroup", "start_grad_sync", gradients.in_a_fixed_order),
        ("optimizer.distrib_optimizer", "DistributedOptimizer", "__init__", gradients.with_order_of_parameters),
        ("optimizer.optimizer", "MegatronOptimizer", "get_grad_norm", gradients.invariant_grad_norm),
        ("optimizer.optimizer", "MegatronOptimizer", "clip_grad_norm", gradients.invariant_clip),
        ("optimizer.optimizer", "ChainedOptimizer", "get_grad_norm", gradients.invariant_grad_norm),
    ]


_WRAPPERS = (
    _checked, _fused_in_module, gradients.without_complete_gradients, gradients.invariant_grad_norm,
    gradients.invariant_clip, gradients.in_a_fixed_order, gradients.with_order_of_parameters,
)  # fmt: skip


def _of_megatron_training() -> Iterator[tuple[str, str | None, str, Any]]:
    """The same of megatron.training, where it is installed: what pads vocabularies, and names that it has imported."""
    models = "megatron.training.models."
    places: list[tuple[str, str, Any]] = [
        ("megatron.training.tokenizer.tokenizer", "_vocab_size_with_padding", _padded),  # 0.16
        ("megatron.training.vocab_utils", "calculate_padded_vocab_size", _padded_by_builder),
        (models + "gpt", "calculate_padded_vocab_size", _padded_by_builder),
        (models + "hybrid", "calculate_padded_vocab_size", _padded_by_builder),
    ]
    if HAS_HYBRID:
        places.append((models + "hybrid", "default_hybrid_stack_spec", spec.hybrid_stack_spec()))
    for module, name, new in places:
        with suppress(ImportError):
            if hasattr(importlib.import_module(module), name):
                yield module, None, name, new


def _replace(places: list[tuple[str, str | None, str, Any]], former: list[tuple[Any, str, Any]]) -> None:
    for module, cls, name, new in places:
        owner: Any = importlib.import_module(module if module.startswith("megatron.") else _CORE + module)
        owner = owner if cls is None else getattr(owner, cls)
        old = vars(owner)[name]
        former.append((owner, name, old))
        setattr(owner, name, new(old) if new in _WRAPPERS else new)


def _restore(former: list[tuple[Any, str, Any]]) -> None:
    while former:
        owner, name, old = former.pop()
        setattr(owner, name, old)


def install(*, models: bool = True) -> list[str]:
    """Replaces what Megatron's models and training loop are made of; call it before a model is built.

    A second call adds what the first one left out.

    Args:
        models: False replaces what acts on gradients alone, for models that are built of GPTModel, HybridModel or the
            specs of this package.

    Returns:
        The names of what was replaced.
    """
    places = [] if _former else _of_training()
    if models and not _are_models_replaced():
        places += [*_of_models(), *_of_megatron_training()]
    try:
        _replace(places, _former)
    except Exception:
        _restore(_former)
        raise
    return replaced()


def _are_models_replaced() -> bool:
    return any(owner is MegatronGPTModel for owner, _, _ in _former)


def uninstall() -> None:
    """Puts back what install() replaced. Models that were built stay as they are."""
    _restore(_former)


def replaced() -> list[str]:
    """The attributes of Megatron that are replaced at the moment, as module.attribute."""
    return [f"{getattr(owner, '__qualname__', owner.__name__)}.{name}" for owner, name, _ in _former]


@contextmanager
def _models_replaced() -> Iterator[None]:
    """While a subclass's constructor runs: what models are made of is this package's."""
    former: list[tuple[Any, str, Any]] = []
    if not _are_models_replaced():
        _replace(_of_models(), former)
    try:
        yield
    finally:
        _restore(former)


class _OfThisPackage:
    """What the subclasses below derive from, before Megatron's model."""

    compute_language_model_loss = _loss

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with _models_replaced():
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # Megatron's


class GPTModel(_OfThisPackage, MegatronGPTModel):
    """Megatron's GPTModel of this package's modules, without install(models=True); the arguments are Megatron's.

    For training call install(models=False) besides, or sum gradients and compute their norm by functions of yours.
    """


if HAS_HYBRID:
    from megatron.core.models.hybrid.hybrid_model import HybridModel as MegatronHybridModel

    class HybridModel(_OfThisPackage, MegatronHybridModel):
        """The same of Megatron's HybridModel, of attention and MLP layers ("*-*-")."""
