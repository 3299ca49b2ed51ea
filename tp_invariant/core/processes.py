"""How processes end, and the removal of folders that killed processes have left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _OWNER = "tp_invariant_", "owner.lock"
_PATIENCE_SECONDS = 5.0


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


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A folder of this process's own, removed at the end of the block.

    A process that is killed removes nothing. So each folder contains a file that its owner keeps locked. The operating
    system removes the lock when the owner ends, in whatever way. The next process that makes a folder with the same
    purpose removes the folders whose owners have ended.
    """
    prefix = f"{_PREFIX}{purpose}_"
    _remove_leftovers(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # locked before it has its name, so that nobody ever sees an unlocked one whose owner lives
    with open(folder / "new.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / _OWNER)
        try:
            yield folder
        finally:
            _remove(folder)


def _remove_leftovers(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNER}"):
        with contextlib.suppress(OSError):  # another user's, still locked, or being removed by another process
            if path.parent.stat().st_uid != os.getuid() or path.parent.is_symlink():
                continue
            with open(path, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent)


def _remove(folder: Path) -> None:
    """Retries for some seconds, because rank processes whose parent was killed may write there for another second."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)
