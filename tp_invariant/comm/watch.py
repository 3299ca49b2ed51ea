"""A thread that reports on stderr which rank has ended, for groups on NCCL, which report nothing before their time-out.

On NCCL a collective with a dead rank hangs. After the group's time-out torch's watchdog thread ends the process, so
liveness.py gets no error to explain; with TORCH_NCCL_BLOCKING_WAIT=1 it gets one, but only after the time-out. So each
process holds one connection to the listening socket of every other rank, and a thread waits on all of them: nothing is
sent and nothing polled. When a process ends, in whatever way, the operating system closes its connections.

A process that ends normally sends GOODBYE first; one that ends by an uncaught exception closes its socket without it.
If a rank ends without GOODBYE, the thread reports it after a short grace period, in which a launcher may end this
process too. sys.exit(1) in a main program counts as a normal end, because Python does not pass the status to exit
handlers; os._exit(0) does not. If a host loses power or network, its connections are not closed, and the thread does
not notice.
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
from .liveness import Contact, GroupLike

_GRACE_SECONDS = 2.0
_MAX_WATCHED = 64  # at most so many ranks of a group does a rank watch: the next ones, so that all are watched equally
_NOT_WATCHED = "ranks that end will not be named"


def watch_group(contacts: Sequence[Contact], group: GroupLike) -> None:
    """Starts watching the other ranks of a group on NCCL, at most the next `_MAX_WATCHED`. Ignores other groups."""
    process_group = group.process_group
    if process_group is None or group.size == 1 or "cuda:nccl" not in dist.get_backend_config(process_group):
        return
    try:
        watch([*contacts[group.rank + 1 :], *contacts[: group.rank]][:_MAX_WATCHED], timeout_of(process_group))
    except (OSError, RuntimeError) as error:  # no file or thread left; if this rank alone raised, ranks would diverge
        _write_message(f"{_NOT_WATCHED}: {error}")


def timeout_of(process_group: dist.ProcessGroup) -> float | None:
    """The time-out of a group's collectives on GPUs, in seconds; None if its backend does not expose it."""
    try:
        return process_group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend in a wrapper
        return None


def watch(others: Sequence[Contact], seconds: float | None) -> None:
    """Starts watching these ranks. `seconds`: the time-out of their group, for the message."""
    global _watcher
    if _watcher is None:
        _watcher = _Watcher()
        _watcher.start()
        # Not atexit, which multiprocessing's children do not run. A Finalize is bound to its process: a forked child
        # does not run it.
        Finalize(None, _end, exitpriority=0)
    _watcher.add(others, seconds)


class _Watcher(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="tp_invariant.watch", daemon=True)
        self._wake_sender, self._wake_receiver = socket.socketpair()  # to wake the thread
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._new: deque[tuple[Contact, float | None]] = deque()
        self._known: set[Contact] = set()
        self._ended: list[tuple[Contact, float | None]] = []  # ended without GOODBYE and not yet reported, in order
        self._deadline = 0.0
        self._first_ended: Contact | None = None
        self._stopped = False

    def add(self, contacts: Sequence[Contact], seconds: float | None) -> None:
        self._new.extend((contact, seconds) for contact in contacts)
        self._wake_sender.send(b"\0")

    def stop(self) -> None:
        self._stopped = True
        self._wake_sender.send(b"\0")
        self.join(timeout=1.0)

    def close(self) -> None:
        """Closes this object's sockets in a forked child, which has no such thread; those of the parent stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._wake_sender.close()
        self._selector.close()

    def run(self) -> None:
        try:
            while not self._stopped:
                self._poll_once()
        except Exception as error:
            with suppress(Exception):
                _write_message(f"{_NOT_WATCHED}: {type(error).__name__}: {error}")

    def _poll_once(self) -> None:
        wait = max(0.0, self._deadline - time.monotonic()) if self._ended else None
        for key, _ in self._selector.select(wait):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            elif not self._says_goodbye(key.fileobj):
                self._deadline = self._deadline if self._ended else time.monotonic() + _GRACE_SECONDS
                self._ended.append(key.data)
        while self._new:
            self._connect(*self._new.popleft())
        if self._ended and not self._stopped and time.monotonic() >= self._deadline:
            self._report_ended()

    def _says_goodbye(self, connection: socket.socket) -> bool:
        self._selector.unregister(connection)
        with connection, suppress(OSError):  # reset by the peer if it had not accepted the connection
            return connection.recv(len(liveness.GOODBYE)) == liveness.GOODBYE
        return False

    def _connect(self, contact: Contact, seconds: float | None) -> None:
        if contact in self._known or not liveness.has_address(contact):
            return
        with suppress(OSError):
            connection = liveness.connect(contact, liveness.WATCHING)
            self._selector.register(connection, selectors.EVENT_READ, (contact, seconds))
            self._known.add(contact)
            self._first_ended = None  # new ranks: a rank that ends from now on has another cause

    def _report_ended(self) -> None:
        (contact, seconds), *after = self._ended
        if self._first_ended is None:
            self._first_ended = contact
            later = "".join(f"; rank {liveness.format_rank(other.rank, other)} ended after" for other, _ in after)
            timeout = "the group's time-out" if seconds is None else f"the group's time-out of {seconds:g} s"
            named = liveness.format_rank(contact.rank, contact)
            _write_message(
                f"rank {named} has ended{later}. Collectives with it cannot finish: "
                f"some time after {timeout} torch's NCCL watchdog ends this process (with TORCH_NCCL_BLOCKING_WAIT=1 "
                f"they raise an error then). Look for the first error or signal in the output of rank {contact.rank}, "
                "then restart all ranks from the last checkpoint"
            )
        else:
            names = ", ".join(liveness.format_rank(other.rank, other) for other, _ in self._ended)
            _write_message(f"rank {names} ended after rank {self._first_ended.rank}, most likely for the same reason")
        self._ended.clear()


_watcher: _Watcher | None = None


def _forget() -> None:
    """Runs in a forked child, say a data loader's worker: it must not keep its parent's connections open."""
    global _watcher
    if _watcher is not None:
        _watcher.close()
        _watcher = None


os.register_at_fork(after_in_child=_forget)


def _end() -> None:
    """Runs at the end of the process, if Python's exit handlers run."""
    if _watcher is not None:
        _watcher.stop()
    # in a multiprocessing child the exception is still being handled; in a main program only last_value is left
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    liveness.close_socket(goodbye=error is None or (isinstance(error, SystemExit) and not error.code))


def _write_message(message: str) -> None:
    sys.stderr.write(f"tp_invariant: {message}\n")
    sys.stderr.flush()
