"""What models of transformers alone need: attention under their name for it, their masks, their loss."""

from .models import register_attention

__all__ = ["register_attention"]
