"""Support for models of transformers: a registered attention function, attention masks, and the causal-LM loss."""

from .models import register_attention

__all__ = ["register_attention"]
