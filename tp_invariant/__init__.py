"""Tensor-parallel layers whose bits do not depend on the tensor-parallel degree."""

from . import checkpoint, data_parallel, determinism, graphs, hugging_face, testing
from .attention import attention
from .batch_invariant import batch_invariant
from .convert import parallelize
from .cross_entropy import vocab_parallel_cross_entropy
from .digest_log import DigestLog
from .full_optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from .full_state import full_state_dict, load_full_state_dict
from .gemm import set_default_gemm_fn
from .grad_norm import clip_grad_norm_
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .liveness import DeadRankError
from .mode import is_tp_invariant_mode_enabled, set_tp_invariant_mode
from .parallel_norm import ParallelNorm
from .plans import Part
from .version import __version__
from .vocab_embedding import VocabParallelEmbedding

__all__ = [
    "DeadRankError",
    "DigestLog",
    "LayerNormLinear",
    "Linear",
    "ParallelNorm",
    "Part",
    "VocabParallelEmbedding",
    "__version__",
    "attention",
    "batch_invariant",
    "checkpoint",
    "clip_grad_norm_",
    "data_parallel",
    "determinism",
    "full_optimizer_state_dict",
    "full_state_dict",
    "graphs",
    "hugging_face",
    "is_tp_invariant_mode_enabled",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "parallelize",
    "set_default_gemm_fn",
    "set_tp_invariant_mode",
    "testing",
    "vocab_parallel_cross_entropy",
]
