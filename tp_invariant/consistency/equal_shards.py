"""Notices that a tool has copied one rank's part of a sharded parameter to the other ranks.

A parameter of a layer whose tp_group is a ProcessGroup is a plain tensor, which does not say that other ranks hold
other parts. DistributedDataParallel and fully_shard over the ranks of tp_group, trainers, and loads of one rank's file
on all ranks make the parts equal. All shapes remain right, and the model computes something else. So at the first call
of a layer its ranks exchange a hash of their parts, beside what they compare there anyway (agreement.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.bits import tensor_hash
from .differences import format_ranks, ranks_by_value


def shard_hash(weight: Tensor, allowed: bool) -> int:
    """A hash of this rank's part; 0, which equals nobody's, if parts may be equal, or all its elements are.

    Weights that were filled with zeros or ones are equal on all ranks, and so are parts of padding alone. Tensors
    without values (on the meta device, or fake ones while code is traced) are equal to nobody's, either.

    Args:
        weight: the local tensor.
        allowed: what the parameter says, see `check_shards`.
    """
    if allowed or type(weight) not in (Tensor, nn.Parameter) or weight.is_meta or not weight.numel():
        return 0
    with torch.no_grad():
        first = weight.reshape(-1)[0]
        # NaN equals nothing: it is what to_empty() leaves under torch.use_deterministic_algorithms
        constant = bool((weight != weight).all() if first != first else (weight == first).all())
        return 0 if constant else int(tensor_hash(weight.detach()))


def check_shards(hashes: Sequence[int], layer: str) -> None:
    """Whether the ranks' parts differ, given each rank's shard_hash.

    Raises:
        RuntimeError: the same on every rank; names the ranks whose parts are equal.
    """
    equal = [ranks for value, ranks in ranks_by_value(enumerate(hashes)).items() if value and len(ranks) > 1]
    if equal:
        ranks = "; and on ".join(map(format_ranks, equal))
        raise RuntimeError(
            f"the weight of {layer} is the same on {ranks} of tp_group, which must hold "
            "different parts of it: one rank's part has been copied to the others, or code of yours has drawn the same "
            "values on each. DistributedDataParallel, fully_shard and trainers must be given the data parallel ranks "
            "alone, without those of tp_group; initialise by init_method; load weights by "
            "tp_invariant.load_full_state_dict or tp_invariant.checkpoint.load. Do so, and load the weights again. If "
            "the parts are equal on purpose, set shards_may_be_equal = True, of the weight or of the layer, on every "
            "rank"
        )
