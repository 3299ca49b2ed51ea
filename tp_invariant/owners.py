"""Owner maps by their public path; they are in gemm/owner_maps.py."""

from .gemm.owner_maps import (
    OWNER_MAPS,
    Product,
    ShardedWeight,
    check_owner_map,
    explain_choice,
    resolve_owner_map,
    sharded_product,
    start_product,
)
from .gemm.weights import WeightLayout, weight_cache

__all__ = [
    "OWNER_MAPS",
    "Product",
    "ShardedWeight",
    "WeightLayout",
    "check_owner_map",
    "explain_choice",
    "resolve_owner_map",
    "sharded_product",
    "start_product",
    "weight_cache",
]
