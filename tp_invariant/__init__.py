"""Tensor-parallel layers whose bits do not depend on the tensor-parallel degree."""

from typing import TYPE_CHECKING, Any

from . import checkpoint, data_parallel, determinism, graphs, hugging_face, optim, sampling, testing
from . import owners as owners
from . import parameters as parameters
from . import plans as plans
from . import regions as regions
from .batch_invariant.context import batch_invariant
from .checkpoint.full_optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from .checkpoint.full_state import full_state_dict, load_full_state_dict
from .checkpoint.hand_over import hand_over
from .comm.liveness import DeadRankError
from .conversion.convert import parallelize
from .conversion.plans import Part
from .core.mode import is_tp_invariant_mode_enabled, set_tp_invariant_mode
from .diagnostics.digest_log import DigestLog
from .functional.attention import attention
from .functional.cross_entropy import vocab_parallel_cross_entropy
from .functional.gated import gated_activation
from .functional.regions import sequence_part
from .functional.rotary_embedding import rotary_embedding
from .functional.router_losses import load_balancing_loss, router_z_loss
from .functional.routing import Routing
from .gemm.gemm_fn import set_default_gemm_fn
from .layers.experts import Experts
from .layers.fsdp import fsdp_placement
from .layers.grad_norm import clip_grad_norm_
from .layers.layernorm_linear import LayerNormLinear
from .layers.linear import Linear
from .layers.mixture import MixtureOfExperts
from .layers.parallel_norm import ParallelNorm
from .layers.replicate import replicate_
from .layers.sequence_chunks import context_parallel_
from .layers.vocab_embedding import VocabParallelEmbedding
from .sampling.log_probs import linear_cross_entropy, token_log_probs
from .version import __version__

if TYPE_CHECKING:
    from .styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "DeadRankError",
    "DigestLog",
    "Experts",
    "LayerNormLinear",
    "Linear",
    "MixtureOfExperts",
    "ParallelNorm",
    "Part",
    "Routing",
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallelEmbedding",
    "__version__",
    "attention",
    "batch_invariant",
    "checkpoint",
    "clip_grad_norm_",
    "context_parallel_",
    "data_parallel",
    "determinism",
    "fsdp_placement",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gated_activation",
    "graphs",
    "hand_over",
    "hugging_face",
    "is_tp_invariant_mode_enabled",
    "linear_cross_entropy",
    "load_balancing_loss",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "optim",
    "parallelize",
    "replicate_",
    "rotary_embedding",
    "router_z_loss",
    "sampling",
    "sequence_part",
    "set_default_gemm_fn",
    "set_tp_invariant_mode",
    "testing",
    "token_log_probs",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        from . import styles  # torch's styles, from which these derive, take half a second to import

        return getattr(styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
