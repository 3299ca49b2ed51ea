"""Cases of long tests that run with --all-cases alone, or where a test is named after ::."""

from typing import Any

import pytest


def more(*values: Any) -> Any:
    """Among the values of pytest.mark.parametrize: a further case."""
    return pytest.param(*values, marks=pytest.mark.more)
