"""The version, which stands in pyproject.toml alone."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tp-invariant")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "unknown"
