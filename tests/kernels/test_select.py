"""Which module computes an operation on a device."""

import re

import pytest

from tp_invariant.kernels.select import _MODULES, select


@pytest.mark.parametrize("operation", _MODULES)
def test_each_device_has_its_module(operation):
    on_cuda, on_cpu = (select(operation, device_type) for device_type in ("cuda", "cpu"))
    assert on_cuda is not on_cpu
    assert hasattr(on_cuda, "triton")
    assert not hasattr(on_cpu, "triton")


def test_another_device_is_refused():
    text = "no norm is bundled for device 'meta': bundled are cuda and cpu"
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        select("norm", "meta")
