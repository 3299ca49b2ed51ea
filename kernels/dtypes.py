"""The dtypes that kernels take. No Triton here."""

from __future__ import annotations

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)  # of 16 bits: those that tensor cores multiply
DTYPES = (*HALF_DTYPES, torch.float32)
