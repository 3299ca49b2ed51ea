"""Full tensors and sharded checkpoints: written at any degree, read at any other."""

from .boxes import as_boxes
from .save_load import load, save

__all__ = [
    "as_boxes",
    "load",
    "save",
]
