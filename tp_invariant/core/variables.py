"""The environment variables of this library: one table, which all that reads them and docs/api.md go by."""

from __future__ import annotations

import difflib
import os
import warnings

MODE_VARIABLE = "TP_INVARIANT_MODE"
ALIAS_VARIABLE = "NVTE_TP_INVARIANT_MODE"  # the name that Transformer Engine PR 2977 proposes
CHECK_VARIABLE = "TP_INVARIANT_CHECK"
TRANSPORT_VARIABLE = "TP_INVARIANT_TRANSPORT"
SHARE_VARIABLE = "TP_INVARIANT_RANKS_SHARE_GPUS"
RANK_DEVICE_VARIABLE = "TP_INVARIANT_RANK_DEVICE"

# The values that a user may set. kernels/, which imports nothing of core/, reads TP_INVARIANT_AUTOTUNE.
VARIABLES = {
    MODE_VARIABLE: ("1", "0"),
    ALIAS_VARIABLE: ("1", "0"),
    CHECK_VARIABLE: ("1", "0"),
    TRANSPORT_VARIABLE: ("auto", "nccl", "copy_engine"),
    "TP_INVARIANT_AUTOTUNE": ("1", "0"),
    SHARE_VARIABLE: ("1",),
}
SET_FOR_RANKS = (RANK_DEVICE_VARIABLE,)  # by testing.run_ranks, in its rank processes


def warn_of_unknown_variables() -> None:
    """Warns of each variable that begins like one of this library's and is none, such as TP_INVARIANT_MODES."""
    prefix = "TP_INVARIANT_"
    known = {name.replace(prefix, ""): name for name in VARIABLES}  # the prefix alone would be near enough
    for name in sorted(os.environ):
        if name.startswith((prefix, f"NVTE_{prefix}")) and name not in (*VARIABLES, *SET_FOR_RANKS):
            near = difflib.get_close_matches(name.replace(prefix, ""), known, n=1)
            meant = f": did you mean {known[near[0]]}?" if near else "."
            warnings.warn(
                f"the environment variable {name} is unknown to tp_invariant, and has no effect{meant} Known are "
                f"{', '.join(VARIABLES)}",
                stacklevel=3,
            )
