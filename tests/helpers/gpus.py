"""The marks of tests that run on GPUs alone."""

import pytest
import torch

from tp_invariant.testing import gpu_ranks


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def on_gpus(*counts, before=(), shared=True):
    """Parameters of a test of as many ranks on GPUs, after the values `before`; skipped where there are fewer GPUs.

    With TP_INVARIANT_RANKS_SHARE_GPUS=1 up to eight ranks share the GPUs that there are, unless `shared` is False.
    """
    most = gpu_ranks() if shared else torch.cuda.device_count()
    return [
        pytest.param(*before, n, marks=[pytest.mark.gpu, pytest.mark.skipif(n > most, reason=f"needs {n} GPUs")])
        for n in counts
    ]
