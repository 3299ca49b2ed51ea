"""How processes end."""

from __future__ import annotations

import os
import signal
import threading
import time


def how_it_ended(status: int) -> str:
    """ "ended by SIGILL", or "ended with status 3"; status is subprocess's, negative for a signal."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"


def end_with_parent(parent: int | None = None) -> None:
    """Makes this process end once its parent has ended, even while it computes.

    parent: whose child this process was at its start, where it may have ended before this call; None: today's parent.
    """
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
