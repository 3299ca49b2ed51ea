"""A thread that says on stderr which rank has ended, for groups on NCCL, where nothing else does before time is up.

On NCCL a collective with a dead rank hangs. When the group's time-out is over torch's watchdog ends the process from a
thread of its own, so liveness.py has no error to explain; with TORCH_NCCL_BLOCKING_WAIT=1 it has, but no sooner. So
each process holds one connection to the listening socket of every other rank and sleeps on them all: nothing is sent
and nothing polled. When a process ends, however it does, its kernel ends its connections.

A process that ends well says goodbye first, one that ends by an uncaught exception closes its socket without. The end
of a rank without goodbye is said after a short grace, in which a launcher may end this process too. sys.exit(1) in a
main program counts as a good end, since Python does not tell its exit handlers; os._exit(0) does not. A host that loses
power or network ends no connection: that the watch does not see.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist

from . import liveness
from .liveness import Contact, Ranks

_GRACE = 2.0  # seconds
_MOST = 64  # ranks of one group that one rank watches: those after it, so that each is watched by as many
_UNWATCHED = "ranks that end will not be named"


def watch_group(contacts: Sequence[Contact], group: Ranks) -> None:
    """Watches the other ranks of a group on NCCL from now on; of a large one, the next `_MOST`. Others it leaves."""
    process_group = group.process_group
    if process_group is None or group.size == 1 or "cuda:nccl" not in dist.get_backend_config(process_group):
        return
    try:
        watch([*contacts[group.rank + 1 :], *contacts[: group.rank]][:_MOST], timeout_of(process_group))
    except (OSError, RuntimeError) as error:  # no file or thread to be had; raised here, it would part the ranks
        _say(f"{_UNWATCHED}: {error}")


def timeout_of(process_group: dist.ProcessGroup) -> float | None:
    """The time-out of a group's collectives on GPUs, seconds; None where its backend does not show it."""
    try:
        return process_group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend in a wrapper
        return None


def watch(others: Sequence[Contact], seconds: float | None) -> None:
    """Watches these ranks from now on. `seconds`: the time-out of their group, for the message."""
    global _watcher
    if _watcher is None:
        _watcher = _Watcher()
        _watcher.start()
        # not atexit, which children of multiprocessing do not run; it goes by process, so a forked child leaves it be
        Finalize(None, _end, exitpriority=0)
    _watcher.add(others, seconds)


class _Watcher(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="tp_invariant.watch", daemon=True)
        self._bell, self._ear = socket.socketpair()  # to wake it up
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._new: deque[tuple[Contact, float | None]] = deque()
        self._known: set[Contact] = set()
        self._ended: list[tuple[Contact, float | None]] = []  # without goodbye and not yet said, in this order
        self._due = 0.0
        self._first: Contact | None = None
        self._stopped = False

    def add(self, contacts: Sequence[Contact], seconds: float | None) -> None:
        self._new.extend((contact, seconds) for contact in contacts)
        self._bell.send(b"\0")

    def stop(self) -> None:
        self._stopped = True
        self._bell.send(b"\0")
        self.join(timeout=1.0)

    def close(self) -> None:
        """In a forked child, where the thread is not: what it shares with its parent stays as it is."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._bell.close()
        self._selector.close()

    def run(self) -> None:
        try:
            while not self._stopped:
                self._look_once()
        except Exception as error:
            with suppress(Exception):
                _say(f"{_UNWATCHED}: {type(error).__name__}: {error}")

    def _look_once(self) -> None:
        wait = max(0.0, self._due - time.monotonic()) if self._ended else None
        for key, _ in self._selector.select(wait):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._ear:
                self._ear.recv(4096)
            elif not self._says_goodbye(key.fileobj):
                self._due = self._due if self._ended else time.monotonic() + _GRACE
                self._ended.append(key.data)
        while self._new:
            self._connect(*self._new.popleft())
        if self._ended and not self._stopped and time.monotonic() >= self._due:
            self._tell()

    def _says_goodbye(self, connection: socket.socket) -> bool:
        self._selector.unregister(connection)
        with connection, suppress(OSError):  # reset, where the peer had not accepted it
            return connection.recv(len(liveness.GOODBYE)) == liveness.GOODBYE
        return False

    def _connect(self, contact: Contact, seconds: float | None) -> None:
        if contact in self._known or not liveness.has_address(contact):
            return
        with suppress(OSError):
            connection = liveness.connect(contact, liveness.WATCHING)
            self._selector.register(connection, selectors.EVENT_READ, (contact, seconds))
            self._known.add(contact)
            self._first = None  # the job goes on, with others: what ends now has a reason of its own

    def _tell(self) -> None:
        (contact, seconds), *after = self._ended
        if self._first is None:
            self._first = contact
            later = "".join(f"; rank {liveness.name_of(other.rank, other)} ended after" for other, _ in after)
            timeout = "the group's time-out" if seconds is None else f"the group's time-out of {seconds:g} s"
            _say(
                f"rank {liveness.name_of(contact.rank, contact)} has ended{later}. Collectives with it cannot finish: "
                f"some time after {timeout} torch's NCCL watchdog ends this process (with TORCH_NCCL_BLOCKING_WAIT=1 "
                f"they raise an error then). Look for the first error or signal in the output of rank {contact.rank}, "
                "then restart all ranks from the last checkpoint"
            )
        else:
            names = ", ".join(liveness.name_of(other.rank, other) for other, _ in self._ended)
            _say(f"rank {names} ended after rank {self._first.rank}, most likely for the same reason")
        self._ended.clear()


_watcher: _Watcher | None = None


def _forget() -> None:
    """In a forked child, say a data loader's worker: whoever watches its parent must not wait for it."""
    global _watcher
    if _watcher is not None:
        _watcher.close()
        _watcher = None


os.register_at_fork(after_in_child=_forget)


def _end() -> None:
    """At the end of the process, as far as Python gets to see it."""
    if _watcher is not None:
        _watcher.stop()
    # in a child of multiprocessing its exception is on the way; at the end of a main program only its trace is left
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    liveness.end(goodbye=error is None or (isinstance(error, SystemExit) and not error.code))


def _say(message: str) -> None:
    sys.stderr.write(f"tp_invariant: {message}\n")
    sys.stderr.flush()
