"""The mark of tests that run on a GPU alone."""

import pytest
import torch


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))
