"""What models of transformers alone need: attention under their name for it, their masks, their loss."""

from .models import NAME, SAFE_IMPLEMENTATIONS, CausalLMLoss, config_values, install, problem_with, register_attention

__all__ = [
    "NAME",
    "SAFE_IMPLEMENTATIONS",
    "CausalLMLoss",
    "config_values",
    "install",
    "problem_with",
    "register_attention",
]
