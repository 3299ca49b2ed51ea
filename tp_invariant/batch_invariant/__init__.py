"""Batch invariance for code that is not this library's."""

from .context import (
    batch_invariant,
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)

__all__ = [
    "batch_invariant",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]
