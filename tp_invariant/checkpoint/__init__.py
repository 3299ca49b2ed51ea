"""Full tensors and sharded checkpoints: written at any degree, read at any other."""

from .save_load import load, save

__all__ = [
    "load",
    "save",
]
