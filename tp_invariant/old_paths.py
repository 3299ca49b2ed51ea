"""Modules under the paths that they had while the package was one folder, for what was written then.

A pickled layer, parameter or group names the module that its class was in, and an installed `tp-invariant` command the
one that its `main` was in.
"""

from __future__ import annotations

import sys

import torch

from .comm import collectives
from .consistency import agreement
from .core import elementwise
from .diagnostics import cli
from .layers import layernorm_linear, linear, parallel_norm, vocab_embedding

for _module in (agreement, cli, collectives, layernorm_linear, linear, parallel_norm, vocab_embedding):
    sys.modules.setdefault(f"{__package__}.{_module.__name__.rpartition('.')[2]}", _module)

# Classes under the names that they had when they were pickled
agreement.Agreed = agreement.AgreedCalls  # type: ignore[attr-defined]
elementwise.WholeVectors = elementwise.PositionInvariantActivation  # type: ignore[attr-defined]

torch.serialization.add_safe_globals(  # what torch.load(.., weights_only=True) may call
    [
        (collectives.Group, "tp_invariant.collectives.Group"),
        (collectives._unpickled_group, "tp_invariant.collectives._unpickled_group"),
    ]
)
