"""The words that options take, as types: a type checker refuses a misspelled one, and an editor lists them."""

from __future__ import annotations

from typing import Literal

ParallelMode = Literal["column", "row"]
OwnerMap = Literal["auto", "replicate", "rows", "cols"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Reduction = Literal["mean", "sum", "none"]
