"""Ways into and out of sharded regions by their public path; they are in functional/regions.py."""

from .functional.regions import gather_features, gather_sequence, scatter_features, scatter_sequence

__all__ = [
    "gather_features",
    "gather_sequence",
    "scatter_features",
    "scatter_sequence",
]
