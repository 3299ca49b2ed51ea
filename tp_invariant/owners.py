"""Owner maps by their public path; they are in gemm/owner_maps.py."""

from .gemm.owner_maps import OWNER_MAPS, explain_choice
from .gemm.weights import weight_cache

__all__ = ["OWNER_MAPS", "explain_choice", "weight_cache"]
