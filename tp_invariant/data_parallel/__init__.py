"""Gradient sums over data-parallel ranks in a fixed order."""

from typing import TYPE_CHECKING, Any

from ..layers.other_stage import stages_of
from .fixed_order import FixedOrderReduceScatter, TokenCount, fix_reduction_order, fixed_order_hook
from .micro_batch_tree import MicroBatchTree

if TYPE_CHECKING:
    from .stage import Stage

__all__ = [
    "FixedOrderReduceScatter",
    "MicroBatchTree",
    "Stage",
    "TokenCount",
    "fix_reduction_order",
    "fixed_order_hook",
    "stages_of",
]


def __getattr__(name: str) -> Any:
    if name == "Stage":  # torch.distributed.pipelining takes a second to import
        from .stage import Stage

        return Stage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
