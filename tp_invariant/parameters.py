"""How parameters are sharded, by its public path; it is in layers/parameters.py."""

from .layers.parameters import (
    KeepsAttributes,
    ShardedModule,
    ShardSpec,
    carried_group,
    full_initialisation,
    groups_in_use,
    is_sharded,
    mark_sharded,
    named_shard_specs,
    set_stride,
    stride_of,
)

__all__ = [
    "KeepsAttributes",
    "ShardSpec",
    "ShardedModule",
    "carried_group",
    "full_initialisation",
    "groups_in_use",
    "is_sharded",
    "mark_sharded",
    "named_shard_specs",
    "set_stride",
    "stride_of",
]
