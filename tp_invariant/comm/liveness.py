"""Finds out, after a collective has failed, which ranks of its group have ended, so that the error can name them.

Gloo reports a closed connection and NCCL a time-out, but neither says which rank caused it. So each process opens a
listening socket, and the ranks of a group exchange their addresses once (consistency/agreement.py). No thread accepts
connections: the operating system completes a connection while the process lives and refuses it afterwards, so nothing
is sent until a collective fails. Then a rank that finds ended ranks reports them to the others. The report stays in the
socket's queue until its receiver, too, has a failed collective to explain. It says which rank ended first, so that a
rank which only sees a survivor end does not blame the survivor.

On NCCL a dead rank is noticed when the group's time-out is over, and then torch's watchdog thread ends the process
before an error can be explained. So on NCCL the ranks also hold connections to each other's sockets, and a thread
reports on stderr which rank has ended as soon as it ends (watch.py); the process still hangs until the time-out. With
TORCH_NCCL_BLOCKING_WAIT=1 the host waits for each collective and raises the error here, also after a time-out; then
host and device no longer work in parallel.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

CONTACT_BYTES = 256
WATCHING = b"watching\n"  # first bytes of a connection that stays open to watch a process; others send a report
GOODBYE = b"goodbye\n"  # sent on such a connection before a process ends normally
# Seconds before each round of probes: the sockets of an ending process close one after another.
_RETRY_DELAYS = (0.0, 0.1, 0.2, 0.4, 0.8)
_CONNECT_SECONDS = 1.0
_LOST = re.compile(r"clos|reset|broken pipe|timed? ?out|abort|remote|unhandled system error|connection", re.IGNORECASE)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


class DeadRankError(RuntimeError):
    """A collective failed because ranks of its group have ended; `ranks` are those ranks, counted in the group."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class GroupLike(Protocol):
    """A collectives.Group."""

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Contact:
    """The address on which a rank listens; port 0 if it could not listen.

    `network` is equal for two processes if they can reach each other by loopback addresses.
    """

    rank: int  # of the whole job
    process: int
    host: str
    network: str
    address: str
    port: int

    def encode(self) -> bytes:
        return "\n".join(map(str, astuple(self))).encode()[:CONTACT_BYTES].ljust(CONTACT_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Contact:
        rank, process, host, network, address, port = data.decode().strip().split("\n")
        return cls(int(rank), int(process), host, network, address, int(port))


# --- our own socket -------------------------------------------------------------------------------------------------

_socket: socket.socket | None = None
_watching: list[socket.socket] = []  # accepted connections of ranks that watch this one; others are still queued


def _forget_socket() -> None:
    """In a forked child, which must not keep its parent's address alive (a data loader's worker, say)."""
    global _socket
    if _socket is not None:
        _socket.close()
        _socket = None
    while _watching:
        _watching.pop().close()
    _network.cache_clear()


os.register_at_fork(after_in_child=_forget_socket)


@cache
def _network() -> str:
    """The machine and its network namespace: the same for processes that can reach each other by loopback."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_address() -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((os.environ.get("MASTER_ADDR", socket.gethostname()), 9))  # sends nothing: finds our own address
            return s.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def own_contact() -> Contact:
    """This process's Contact; opens its socket where there is none yet."""
    global _socket
    address, port = _own_address(), 0
    try:
        if _socket is None:
            _socket = socket.create_server((address, 0), backlog=1024)
            _socket.setblocking(False)
        address, port = _socket.getsockname()
    except OSError:  # no network: the other ranks will see this one as "unknown"
        pass
    return Contact(dist.get_rank(), os.getpid(), socket.gethostname()[:64], _network(), address, port)


_contacts: dict[int, Contact] = {}  # by rank of the whole job


def remember_contacts(contacts: Sequence[Contact]) -> None:
    """Stores the Contacts of a group's ranks, for all groups that contain these ranks."""
    _contacts.update((contact.rank, contact) for contact in contacts)


def close_socket(goodbye: bool) -> None:
    """Closes this process's socket, which watching ranks notice. `goodbye`: tells them that the end is normal."""
    if goodbye:
        _read_failure_reports()
        for connection in _watching:
            with suppress(OSError):  # that rank has ended already
                connection.sendall(GOODBYE)
    _forget_socket()


# --- after a failure ------------------------------------------------------------------------------------------------


def has_address(contact: Contact) -> bool:
    """Whether this process can use the contact's address."""
    return bool(contact.port) and not (contact.address.startswith("127.") and contact.network != _network())


def connect(contact: Contact, word: bytes) -> socket.socket:
    """A connection to that rank's process, with `word` sent. An OSError where there is none."""
    connection = socket.create_connection((contact.address, contact.port), timeout=_CONNECT_SECONDS)
    try:
        connection.sendall(word)
    except OSError:
        connection.close()
        raise
    return connection


def _probe(contact: Contact, word: str) -> str:
    """ "alive", "ended", "unreachable" or "unknown"; sends `word` to a rank that is alive."""
    if not has_address(contact):
        return "unknown"
    try:
        connect(contact, word.encode()).close()
        return "alive"
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return "ended"
    except OSError:
        return "unreachable"


_failure_reports: dict[int, set[int]] = {}  # rank whose collective has failed -> the ended ranks that it reports


def _read_failure_reports() -> None:
    while _socket is not None:
        try:
            connection, _ = _socket.accept()
        except OSError:
            return
        connection.settimeout(_CONNECT_SECONDS)
        try:
            text = connection.recv(65536).decode()
        except (OSError, UnicodeDecodeError):
            text = ""
        if text == WATCHING.decode():  # stays open: closing it would mean that this process has ended
            _watching.append(connection)
            continue
        connection.close()
        for rank, ended in re.findall(r"^(\d+):([\d,]*)$", text, re.MULTILINE):
            _failure_reports.setdefault(int(rank), set()).update(int(other) for other in ended.split(",") if other)


def explain(error: Exception, group: GroupLike, what: str) -> Exception:
    """The exception to raise in place of `error`, with which the collective `what` of the group failed on this rank.

        except RuntimeError as error:
            raise explain(error, group, "all-gather of ..") from error

    It is a DeadRankError if ranks have ended; after a time-out, a RuntimeError that names the ranks that did not join;
    else the error itself. Takes up to two seconds, and up to one more for each host that does not answer.
    """
    ranks = [] if group.process_group is None else dist.get_process_group_ranks(group.process_group)
    if isinstance(error, DeadRankError) or not ranks or not _contacts.keys() >= set(ranks):
        return error
    contacts = [_contacts[rank] for rank in ranks]
    own, others = contacts[group.rank], [rank for rank in range(group.size) if rank != group.rank]
    gone: list[int] = []
    lost = _LOST.search(str(error))
    for wait in _RETRY_DELAYS if lost else _RETRY_DELAYS[:1]:
        time.sleep(wait)
        looks = {rank: _probe(contacts[rank], f"{own.rank}:\n" if lost else "") for rank in others}
        gone = [rank for rank, look in looks.items() if look in ("ended", "unreachable")]
        if gone:
            break
    _read_failure_reports()
    failed = f"{what} failed on rank {group.rank} of {group.size}"
    if gone:
        after = [
            rank for rank in gone if _failure_reports.get(contacts[rank].rank)
        ]  # these had reported other ended ranks
        first = [rank for rank in gone if rank not in after] or gone
        for rank in set(others) - set(gone):
            _probe(contacts[rank], f"{own.rank}:{','.join(str(contacts[rank].rank) for rank in first)}\n")
        verb = "has" if len(first) == 1 else "have"
        how = "ended" if any(looks[rank] == "ended" for rank in first) else "become unreachable"
        named = ", ".join(format_rank(rank, contacts[rank]) for rank in first)
        later = f" (rank {_list(after)} ended after, for the same reason)" if after and first != gone else ""
        return DeadRankError(
            f"rank {named} {verb} {how}{later}: {failed}. Look for the first error or signal in the output of rank "
            f"{_list(first)}, then restart all ranks from the last checkpoint",
            first,
        )
    late = [rank for rank in others if looks[rank] == "alive" and contacts[rank].rank not in _failure_reports]
    if _LATE.search(str(error)) and late:
        named = ", ".join(format_rank(rank, contacts[rank]) for rank in late)
        return RuntimeError(
            f"{failed} with all ranks alive: rank {named} did not join it in time: busy, stuck, or in another call. "
            "Set TP_INVARIANT_CHECK=1 on all ranks to find the first call in which they differ. "
            f"({str(error).splitlines()[0]})"
        )
    return error


def format_rank(rank: int, contact: Contact) -> str:
    """How messages name a rank; `rank` is the rank in the group."""
    return f"{rank} (global rank {contact.rank}, process {contact.process} on {contact.host})"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
