"""Megatron-LM models whose training steps have the same bits at every tensor-parallel degree.

    import tp_invariant.integrations.megatron as tpi_megatron
    tpi_megatron.install()                       # before pretrain_gpt.py builds its model

or, without replacing what models are made of, the models of this package:

    tpi_megatron.install(models=False)           # finalize_model_grads and the gradient norm alone
    model = tpi_megatron.GPTModel(config, tpi_megatron.gpt_block_spec(config), ...)

megatron-core 0.16 and 0.19 are supported; other versions are refused by name. Nothing of this library imports this
package. Its files, each of which imports those above it:

    versions.py     which megatron-core is installed, and whether it is supported
    modules.py      linear layers, the embedding, norms, attention, gated activations and the loss, with Megatron's
                    constructors, attributes on parameters and sharded state dicts
    spec.py         which of these modules a Megatron layer is built of: a BackendSpecProvider and functions for --spec
    checks.py       what of a configuration, and which modules of a model, would break the contract: all faults at once
    gradients.py    Megatron's steps between backward and the optimizer: finalize_model_grads, the gradient norm
    install.py      install() and uninstall(), and the subclasses GPTModel and HybridModel
"""

from . import versions
from .checks import check_config, check_model, padded_vocab_size
from .install import GPTModel, install, replaced, uninstall
from .modules import (
    ColumnParallelLinear,
    CoreAttention,
    GatedActivation,
    LayerNormColumnParallelLinear,
    Norm,
    QKNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from .spec import SpecProvider, gpt_block_spec, gpt_layer_spec, hybrid_stack_spec

__all__ = [
    "ColumnParallelLinear",
    "CoreAttention",
    "GPTModel",
    "GatedActivation",
    "LayerNormColumnParallelLinear",
    "Norm",
    "QKNorm",
    "RowParallelLinear",
    "SpecProvider",
    "VocabParallelEmbedding",
    "check_config",
    "check_model",
    "gpt_block_spec",
    "gpt_layer_spec",
    "hybrid_stack_spec",
    "install",
    "padded_vocab_size",
    "replaced",
    "uninstall",
    "vocab_parallel_cross_entropy",
]

if versions.HAS_HYBRID:
    from .install import HybridModel

    __all__ += ["HybridModel"]
