"""The values of options as Literal types: a type checker refuses a misspelled value, and an editor lists them."""

from __future__ import annotations

from typing import Literal

ParallelMode = Literal["column", "row"]
OwnerMap = Literal["auto", "replicate", "rows", "cols"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Reduction = Literal["mean", "sum", "none"]
