"""Gradient sums over data-parallel ranks in a fixed order."""

from .fixed_order import FixedOrderReduceScatter, TokenCount, fix_reduction_order, fixed_order_hook
from .micro_batch_tree import MicroBatchTree

__all__ = [
    "FixedOrderReduceScatter",
    "MicroBatchTree",
    "TokenCount",
    "fix_reduction_order",
    "fixed_order_hook",
]
