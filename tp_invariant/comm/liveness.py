"""Finds out, after a collective has failed, which ranks of its group have ended, so that the error can name them.

Gloo reports a closed connection and NCCL a time-out, but neither says which rank caused it. So each process opens a
listening socket, and the ranks of a group exchange their addresses once (consistency/agreement.py). Nothing accepts a
connection: the operating system completes one while the process lives, and refuses it afterwards. A rank whose
collective has failed tries to connect to every other rank, and names those that refuse.

On NCCL the host does not wait for collectives, and torch's watchdog ends the process after the group's time-out. With
TORCH_NCCL_BLOCKING_WAIT=1 the host waits, and the error after the time-out names the rank.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import torch.distributed as dist

CONTACT_BYTES = 256
# Seconds before each round of probes: the sockets of an ending process close one after another.
_RETRY_DELAYS = (0.0, 0.1, 0.2, 0.4, 0.8)
_CONNECT_SECONDS = 1.0
_LOST = re.compile(r"clos|reset|broken pipe|timed? ?out|abort|remote|unhandled system error|connection", re.IGNORECASE)
_TIME_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


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
    """The address on which a rank listens; port 0 if it could not listen."""

    rank: int  # of the whole job
    process: int
    host: str
    address: str
    port: int

    def encode(self) -> bytes:
        return "\n".join(map(str, astuple(self))).encode()[:CONTACT_BYTES].ljust(CONTACT_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Contact:
        rank, process, host, address, port = data.decode().strip().split("\n")
        return cls(int(rank), int(process), host, address, int(port))


_socket: socket.socket | None = None
_contacts: dict[int, Contact] = {}  # by rank of the whole job


def _close_in_child() -> None:
    """A forked child (a data loader's worker, say) must not keep its parent's address alive."""
    global _socket
    if _socket is not None:
        _socket.close()
        _socket = None


os.register_at_fork(after_in_child=_close_in_child)


def own_contact() -> Contact:
    """This process's Contact; opens its socket where there is none yet."""
    global _socket
    address, port = "", 0
    try:
        if _socket is None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.connect((os.environ.get("MASTER_ADDR", socket.gethostname()), 9))  # sends nothing: finds our address
                address = s.getsockname()[0]
            _socket = socket.create_server((address, 0), backlog=1024)
        address, port = _socket.getsockname()
    except OSError:  # no network: this rank cannot be probed
        pass
    return Contact(dist.get_rank(), os.getpid(), socket.gethostname()[:64], address, port)


def remember_contacts(contacts: Sequence[Contact]) -> None:
    """Stores the Contacts of a group's ranks, for all groups that contain these ranks."""
    _contacts.update((contact.rank, contact) for contact in contacts)


def _has_ended(contact: Contact) -> bool:
    """Whether that process has ended, or its host does not answer; False where its address cannot be used here."""
    if not contact.port or (contact.address.startswith("127.") and contact.host != socket.gethostname()[:64]):
        return False
    try:
        socket.create_connection((contact.address, contact.port), timeout=_CONNECT_SECONDS).close()
        return False
    except OSError:
        return True


def explain(error: Exception, group: GroupLike, what: str) -> Exception:
    """The exception to raise in place of `error`, with which the collective `what` of the group failed on this rank.

        except RuntimeError as error:
            raise explain(error, group, "all-gather of ..") from error

    It is a DeadRankError if ranks have ended; after a time-out, a RuntimeError that says that none has; else the error
    itself. Takes up to two seconds, and up to one more for each host that does not answer.
    """
    ranks = [] if group.process_group is None else dist.get_process_group_ranks(group.process_group)
    contacts = [_contacts[rank] for rank in ranks if rank in _contacts]
    if isinstance(error, DeadRankError) or len(contacts) != group.size or not _LOST.search(str(error)):
        return error
    failed = f"{what} failed on rank {group.rank} of {group.size}"
    for delay in _RETRY_DELAYS:
        time.sleep(delay)
        ended = [rank for rank, one in enumerate(contacts) if rank != group.rank and _has_ended(one)]
        if ended:
            break
    else:
        if not _TIME_OUT.search(str(error)):
            return error
        return RuntimeError(
            f"{failed} with all ranks alive: some did not join it in time: busy, stuck, or in another call. Set "
            "TP_INVARIANT_CHECK=1 on all ranks to find the first call in which they differ. "
            f"({str(error).splitlines()[0]})"
        )
    named = ", ".join(
        f"{rank} (global rank {contacts[rank].rank}, process {contacts[rank].process} on {contacts[rank].host})"
        for rank in ended
    )
    return DeadRankError(
        f"rank {named} {'has' if len(ended) == 1 else 'have'} ended: {failed}. Look for the first error or signal in "
        f"the output of rank {', '.join(map(str, ended))}, then restart all ranks from the last checkpoint",
        ended,
    )
