"""What tests of torch.compile with inductor need on a CPU."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="inductor's CPU backend needs a C++ compiler and Python's headers: install g++ (or let CXX name another) "
    "and python3-dev",
)
