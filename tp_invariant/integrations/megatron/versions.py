"""Which megatron-core is installed."""

from __future__ import annotations

SUPPORTED = ("0.16", "0.19")  # major.minor


def check_version() -> str:
    """The version of the installed megatron-core.

    Raises:
        ImportError: none is installed, or one whose classes and signatures this package does not know.
    """
    try:
        from megatron.core import __version__
    except ImportError as error:
        raise ImportError(
            "tp_invariant.integrations.megatron needs megatron-core: pip install 'tp-invariant[megatron]'"
        ) from error
    version = str(__version__)
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        known = " and ".join(f"{known}.x" for known in SUPPORTED)
        raise ImportError(
            f"megatron-core {version} is not supported by tp_invariant.integrations.megatron, which knows {known}: "
            "other versions call their layers in other ways. Install one of these"
        )
    return version


VERSION = check_version()
HAS_HYBRID = VERSION.startswith("0.19")  # HybridModel; layers are built by calls and not by build_module
