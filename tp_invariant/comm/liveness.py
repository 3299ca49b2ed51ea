"""Which ranks of a group still live, asked when a collective has failed, so that its error names the rank that is gone.

Gloo says that some connection was closed, NCCL that time is up: neither says which rank it was. So each process opens
a listening socket, and a group's ranks exchange their addresses once (consistency/agreement.py). Nobody waits there for
calls: a kernel completes connections while the process lives and refuses them afterwards, so nothing is sent until
something fails. What is sent then lies in the kernel until its owner has a failure of its own to explain: ranks leave
word of who ended first, so that one which sees only a survivor end does not blame that.

On NCCL a dead peer shows when the group's time-out is over, and torch's watchdog then ends the process from a thread of
its own, before anything can be explained. So there the ranks also hold connections to each other's sockets, and a
thread says on stderr who has ended as soon as one ends (watch.py); the process still hangs until its time is up.
TORCH_NCCL_BLOCKING_WAIT=1 lets the host wait for each collective and raise the error here, also when time is up, at the
price of what host and device do side by side.
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
WATCHING = b"watching\n"  # what a connection begins with that lasts as long as both processes; others carry words
GOODBYE = b"goodbye\n"  # the answer, when the process ends well
_WAITS = (0.0, 0.1, 0.2, 0.4, 0.8)  # seconds before each look around: a process's sockets close one after another
_CONNECT_SECONDS = 1.0
_LOST = re.compile(r"clos|reset|broken pipe|timed? ?out|abort|remote|unhandled system error|connection", re.IGNORECASE)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


class DeadRankError(RuntimeError):
    """A collective failed because ranks of its group have ended; `ranks` are those ranks, counted in the group."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Ranks(Protocol):
    """A collectives.Group."""

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Contact:
    """Where a rank listens. `network` tells whether a loopback address is ours too; port 0: it could not listen."""

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
_watching: list[socket.socket] = []  # those accepted of ranks that watch this one; the others are still in the queue


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
    """What ranks that reach each other by loopback have in common: the machine and its network namespace."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_address() -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((os.environ.get("MASTER_ADDR", socket.gethostname()), 9))  # sends nothing: asks for the way there
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
    except OSError:  # no network for us: the others will not know, and say so
        pass
    return Contact(dist.get_rank(), os.getpid(), socket.gethostname()[:64], _network(), address, port)


_contacts: dict[int, Contact] = {}  # by rank of the whole job


def remember(contacts: Sequence[Contact]) -> None:
    """Keeps the Contacts of a group's ranks, for any group that has them."""
    _contacts.update((contact.rank, contact) for contact in contacts)


def end(goodbye: bool) -> None:
    """Closes this process's socket, which tells those that watch it; with `goodbye`, that all is well."""
    if goodbye:
        _read_words()
        for connection in _watching:
            with suppress(OSError):  # it has ended before
                connection.sendall(GOODBYE)
    _forget_socket()


# --- after a failure ------------------------------------------------------------------------------------------------


def has_address(contact: Contact) -> bool:
    """Whether it has one that means something here."""
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


def _look(contact: Contact, word: str) -> str:
    """ "alive", "ended", "unreachable" or "unknown"; leaves `word` with one that is alive."""
    if not has_address(contact):
        return "unknown"
    try:
        connect(contact, word.encode()).close()
        return "alive"
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return "ended"
    except OSError:
        return "unreachable"


_words: dict[int, set[int]] = {}  # by rank that has seen a collective fail: the ranks that it found ended


def _read_words() -> None:
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
        if text == WATCHING.decode():  # closed, it would say that this process has ended
            _watching.append(connection)
            continue
        connection.close()
        for rank, ended in re.findall(r"^(\d+):([\d,]*)$", text, re.MULTILINE):
            _words.setdefault(int(rank), set()).update(int(other) for other in ended.split(",") if other)


def explain(error: Exception, group: Ranks, what: str) -> Exception:
    """What to raise in place of `error`, with which the collective `what` of the group failed on this rank.

        except RuntimeError as error:
            raise explain(error, group, "all-gather of ..") from error

    A DeadRankError where ranks have ended; for a time-out, a RuntimeError that names those that never came; else the
    error itself. Takes up to two seconds, and up to one more for each host that does not answer.
    """
    ranks = [] if group.process_group is None else dist.get_process_group_ranks(group.process_group)
    if isinstance(error, DeadRankError) or not ranks or not _contacts.keys() >= set(ranks):
        return error
    contacts = [_contacts[rank] for rank in ranks]
    own, others = contacts[group.rank], [rank for rank in range(group.size) if rank != group.rank]
    gone: list[int] = []
    lost = _LOST.search(str(error))
    for wait in _WAITS if lost else _WAITS[:1]:
        time.sleep(wait)
        looks = {rank: _look(contacts[rank], f"{own.rank}:\n" if lost else "") for rank in others}
        gone = [rank for rank, look in looks.items() if look in ("ended", "unreachable")]
        if gone:
            break
    _read_words()
    failed = f"{what} failed on rank {group.rank} of {group.size}"
    if gone:
        after = [rank for rank in gone if _words.get(contacts[rank].rank)]  # they had found others ended
        first = [rank for rank in gone if rank not in after] or gone
        for rank in set(others) - set(gone):
            _look(contacts[rank], f"{own.rank}:{','.join(str(contacts[rank].rank) for rank in first)}\n")
        verb = "has" if len(first) == 1 else "have"
        how = "ended" if any(looks[rank] == "ended" for rank in first) else "become unreachable"
        named = ", ".join(name_of(rank, contacts[rank]) for rank in first)
        later = f" (rank {_list(after)} ended after, for the same reason)" if after and first != gone else ""
        return DeadRankError(
            f"rank {named} {verb} {how}{later}: {failed}. Look for the first error or signal in the output of rank "
            f"{_list(first)}, then restart all ranks from the last checkpoint",
            first,
        )
    late = [rank for rank in others if looks[rank] == "alive" and contacts[rank].rank not in _words]
    if _LATE.search(str(error)) and late:
        return RuntimeError(
            f"{failed} with all ranks alive: rank {', '.join(name_of(rank, contacts[rank]) for rank in late)} did not "
            "join it in time: busy, stuck, or in another call. Set TP_INVARIANT_CHECK=1 on all ranks to find the first "
            f"call in which they part. ({str(error).splitlines()[0]})"
        )
    return error


def name_of(rank: int, contact: Contact) -> str:
    """A rank in messages; `rank` counts in the group in question."""
    return f"{rank} (global rank {contact.rank}, process {contact.process} on {contact.host})"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
