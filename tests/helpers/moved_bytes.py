"""Shared by the tests of collectives: data of any bit patterns, and cases that each rank checks by itself."""

import pytest
import torch
from ranks import run_ranks

from tp_invariant.comm.collectives import resolve_group

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN_WITH_PAYLOAD = {torch.bfloat16: 0x7FC1, torch.float16: 0x7E01, torch.float32: 0x7FC00001}
worlds = pytest.mark.parametrize("world", (2, 3, 8))


def special(shape, dtype, seed):
    """Random bit patterns: infinities and subnormals among them, and a -0.0 and a NaN with a payload in front."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    x = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)
    x[:1] = -0.0
    x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[1:2] = NAN_WITH_PAYLOAD[dtype]
    return x.view(shape)


def check_ranks(world, case):
    """Runs case(group) on every rank; the case asserts and returns how many checks it made, which must not be zero."""
    counts = run_ranks(_on_rank, world, case)
    assert len(counts) == world
    assert counts == counts[:1] * world
    assert counts[0] > 0


def _on_rank(tp_group, case):
    return case(resolve_group(tp_group))
