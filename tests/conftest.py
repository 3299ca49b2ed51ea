"""What every test needs before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    # Triton kernels then run in its interpreter, on CPU tensors; it must know before it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
