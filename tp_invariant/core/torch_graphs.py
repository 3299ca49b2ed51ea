"""Whether an operator runs inside CUDA graphs that torch.compile makes (mode="reduce-overhead").

torch runs such a graph once to warm it up, records it, and replays it. All memory that is allocated meanwhile lies in a
pool of torch's, which must know of all that outlives the graph: results, and what backward needs. And each rank
decides by itself when it records again, so that one may record what others replay. So what moves bytes in there

    leaves nothing    no gather starts ahead of its use, is kept, or is shared, and nothing is learnt of the order of
                      calls, which a replay would not see (gemm/weights.py)
    moves by NCCL     or the group's other collectives, which meet whether a rank calls, records or replays them; copies
                      between peers count their uses otherwise inside of graphs than outside (comm/peer_copies.py)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _OfThread(threading.local):
    inside = False


_of_thread = _OfThread()


def in_torch_graph() -> bool:
    """Whether this thread runs an operator of several ranks whose graph torch.compile makes a CUDA graph of."""
    return _of_thread.inside


@contextmanager
def torch_graph() -> Iterator[None]:
    """Around such an operator, which calls no other."""
    _of_thread.inside = True
    try:
        yield
    finally:
        _of_thread.inside = False
