"""Plans by their public path; they are in conversion/plans.py."""

from .conversion.plans import (
    EMBEDDING_STYLE,
    FUSED_GATE_UP,
    HEADS_STYLE,
    LINEAR_STYLES,
    STYLES,
    WHOLE_STYLES,
    Part,
    own_plan,
    resolve,
)

__all__ = [
    "EMBEDDING_STYLE",
    "FUSED_GATE_UP",
    "HEADS_STYLE",
    "LINEAR_STYLES",
    "STYLES",
    "WHOLE_STYLES",
    "Part",
    "own_plan",
    "resolve",
]
