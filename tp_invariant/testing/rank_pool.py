"""A pool of rank processes that many cases use in turn: starting them takes seconds, a case milliseconds.

Two new interpreters, the starters, import this library and then fork the ranks, which run `serve` of rank_process.py.
They stay, and fork the ranks of the next pool without importing anything, as long as the environment is the same. A
rank gets work from the parent and returns results through a pair of sockets: these have no address, so no other process
can connect, and leave no file behind if the parent is killed. All ranks form the default process group (gloo, and NCCL
if there are GPUs); the group of the first n ranks is created at its first use. If cloudpickle is installed, local
functions can be sent too.

Two starters and not one: Python orders a set of strings by a number that it draws when an interpreter starts. Ranks of
one starter would share it, and no case would show code in which ranks take another order of collectives from a set.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..core import mode
from ..core.processes import how_it_ended
from ..core.variables import RANK_DEVICE_VARIABLE

_GRACE_SECONDS = 20.0  # for the other ranks to answer once one has failed
_START_SECONDS = 300.0  # starting takes seconds on an idle machine, longer on a loaded one
_STARTERS = 2

# Variables that differ between pools which the same starters may fork: what a rank is told anyway, and pytest's name of
# the test that runs. Any other may be read by an import.
_OF_A_POOL = {"MASTER_PORT", "PYTEST_CURRENT_TEST", mode.MODE_VARIABLE, mode.ALIAS_VARIABLE}

imported_by_starters: list[str] = []  # modules beside this library, that ranks would otherwise import one by one


class RankError(AssertionError):
    """A case failed on some rank; the message holds each failing rank's traceback. `errors` maps rank to exception."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass
class Outcome:
    """What one rank sends back."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def dumps(obj: Any) -> bytes:
    foreign = [module for module in _modules_of(obj) if not _is_importable(module.__name__)]
    try:
        import cloudpickle
    except ImportError:
        hint = "define it at the top of an importable module, or pip install cloudpickle"
        if foreign:
            raise TypeError(f"{obj!r} cannot be sent to other processes: {hint}") from None
        try:
            return pickle.dumps(obj)
        except (pickle.PicklingError, AttributeError) as error:
            raise TypeError(f"{obj!r} cannot be sent to other processes: {hint}") from error
    # modules that the ranks cannot import by name (test files under importlib mode, scripts) are sent by value
    for module in foreign:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(obj)
    finally:
        for module in foreign:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of(obj: Any) -> set[ModuleType]:
    """The modules of the functions and objects in nested tuples, lists and mappings."""
    if isinstance(obj, (tuple, list)):
        return set().union(*map(_modules_of, obj))
    if isinstance(obj, Mapping):
        return _modules_of(list(obj.values()))
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    return set() if module is None else {module}


def _is_importable(name: str) -> bool:
    """Whether the ranks, which have the same sys.path, can import this module by its name."""
    top = name.partition(".")[0]
    if top == __name__.partition(".")[0]:
        return True  # an editable install has its own import hook, which PathFinder does not ask
    spec = PathFinder.find_spec(top) or BuiltinImporter.find_spec(top)
    return top != "__main__" and spec is not None and spec.origin == getattr(sys.modules[top], "__file__", spec.origin)


class _Starter:
    """A process that has imported what ranks need, and forks some ranks of one pool after another.

    It is in a session of its own, so that Ctrl-C reaches only the parent, which then ends the ranks.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        command = "import sys; from tp_invariant.testing.rank_process import start_ranks; start_ranks(int(sys.argv[1]))"
        self.pools = 0  # whose ranks have not ended
        self._environment, self._parent, self._executable = environment, os.getpid(), sys.executable
        self._requests, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def serves(self, environment: dict[str, str]) -> bool:
        mine, others = ({k: v for k, v in e.items() if k not in _OF_A_POOL} for e in (self._environment, environment))
        state = self._parent, self._executable, self.process.poll()
        return mine == others and state == (os.getpid(), sys.executable, None)

    def fork(self, size: int, sockets: Mapping[int, socket.socket], environment: dict[str, str]) -> _Ranks:
        """Has it fork the ranks that have these ends of the parent's sockets, without waiting for it."""
        ours, theirs = socket.socketpair()
        request = pickle.dumps((size, list(sockets), environment, os.getcwd(), imported_by_starters))
        with theirs, contextlib.suppress(OSError):  # if it has ended, so has the other end of `ours`
            descriptors = [theirs.fileno(), *(end.fileno() for end in sockets.values())]
            socket.send_fds(self._requests, [len(request).to_bytes(8, "little")], descriptors)
            self._requests.sendall(request)
        self.pools += 1
        return _Ranks(self, Connection(ours.detach()))

    def end(self) -> None:
        self._requests.close()
        self.process.kill()
        self.process.wait()

    def end_if_unused(self) -> None:
        if self.pools == 0 and self not in _starters:
            self.end()


class _Ranks:
    """The ranks of a pool that one starter has forked: a session, whose first process reports how the others ended."""

    def __init__(self, starter: _Starter, reports: Connection) -> None:
        self._starter, self._reports, self._endings = starter, reports, dict[int, int]()
        self._session: int | None = None

    def _read(self, seconds: float) -> bool:
        """Whether a report came. An EOFError means that all have ended, or the starter before it forked them."""
        if not self._reports.poll(seconds):
            return False
        rank, number = pickle.loads(self._reports.recv_bytes())
        if rank is None:
            self._session = number
        else:
            self._endings[rank] = number
        return True

    def ending(self, rank: int) -> str:
        """How a rank's process ended, such as "the process of rank 3 ended by SIGILL"."""
        try:
            while rank not in self._endings and self._read(1.0):
                pass
        except (EOFError, OSError):  # before this rank was started
            if self._session is None:
                self._endings[rank] = self._starter.process.wait(_GRACE_SECONDS)
        if rank not in self._endings:
            return f"the process of rank {rank} has closed its connection"
        return f"the process of rank {rank} {how_it_ended(self._endings[rank])}"

    def end(self) -> None:
        try:
            while self._read(0.0):
                pass
        except (EOFError, OSError):  # they have ended
            return
        if self._session is not None:
            with contextlib.suppress(ProcessLookupError):  # they have ended, and a process that a case left has not
                os.killpg(self._session, signal.SIGKILL)
        else:  # interrupted while the starter imports: it would fork ranks for nobody
            self._starter.end()

    def wait(self) -> None:
        """Returns when the ranks have ended: each of them holds the other end of the connection."""
        with contextlib.suppress(EOFError, OSError):
            while self._read(_GRACE_SECONDS):
                pass
        self._reports.close()
        self._starter.pools -= 1
        self._starter.end_if_unused()


_starters: list[_Starter] = []


def _starter(number: int, environment: dict[str, str]) -> _Starter:
    """The starter of this number for such an environment: one that is there, or a new one in its place."""
    if number == len(_starters):
        _starters.append(_Starter(environment))
    elif not _starters[number].serves(environment):
        before, _starters[number] = _starters[number], _Starter(environment)
        before.end_if_unused()
    return _starters[number]


class RankPool:
    """`size` rank processes on one machine. See `testing.run_ranks` for use."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device, self._owner = size, device, os.getpid()
        # The ranks meet in a store of this process, which listens from now on: of a port that is merely free now,
        # another pool's rank could be the first to listen there.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, RANK_DEVICE_VARIABLE: device}
        environment.update(
            OMP_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._store.port),
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        self._ranks: list[_Ranks] = []
        pairs = [socket.socketpair() for _ in range(size)]
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        try:
            for first in range(min(_STARTERS, size)):
                theirs = {rank: pairs[rank][1] for rank in range(first, size, _STARTERS)}
                self._ranks.append(_starter(first, environment).fork(size, theirs, environment))
            for _, their in pairs:  # so that a connection ends with its rank
                their.close()
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    def _wait_for_all(self) -> None:
        """Returns when every rank has reported that it runs."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + _START_SECONDS
        while waiting:
            ready: list[Any] = wait_for(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = f"ranks {sorted(waiting.values())} did not answer in {_START_SECONDS:.0f} s"
                raise RuntimeError(f"the {self.size} rank processes did not start: {missing}")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    connection.recv_bytes()
                except (EOFError, OSError):
                    raise RuntimeError(f"the {self.size} rank processes did not start: {self._ending(rank)}") from None

    def _ending(self, rank: int) -> str:
        return self._ranks[rank % _STARTERS].ending(rank)

    def run(self, work: bytes, world_size: int, timeout: float) -> list[Outcome | None]:
        """Runs what `packed` returned on ranks 0 .. world_size - 1; None for a rank that did not answer in time."""
        # Every rank gets world_size before any rank gets work: creating the group needs all ranks, and sending work
        # that is larger than a socket's buffer blocks until its rank reads it.
        outcomes: list[Outcome | None] = [None] * world_size
        for rank, message in [*enumerate([pickle.dumps(world_size)] * self.size), *enumerate([work] * world_size)]:
            try:
                self._connections[rank].send_bytes(message)
            except OSError:
                ended = EOFError(f"{self._ending(rank)} before this call")
                return [Outcome(error=ended)] * world_size
        waiting = {connection: rank for rank, connection in enumerate(self._connections[:world_size])}
        deadline = time.monotonic() + timeout
        while waiting:
            ready: list[Any] = wait_for(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    outcome = Outcome(error=EOFError(self._ending(rank)))
                outcomes[rank] = outcome
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return outcomes

    @property
    def is_own(self) -> bool:
        """Whether this process made it. One that was forked since has the same sockets, on which it must not speak."""
        return self._owner == os.getpid()

    def close(self) -> None:
        """Ends the processes; in a process that was forked from the one that made them it leaves them alone."""
        if self.is_own:
            for ranks in self._ranks:
                ranks.end()
            for ranks in self._ranks:
                ranks.wait()
        for connection in self._connections:
            connection.close()


def packed(fn: Callable, args: tuple) -> bytes:
    """The call fn(tp_group, *args) as bytes to send to ranks, with the parent's gate and import path."""
    state = {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "variables": {name: os.environ.get(name) for name in (mode.MODE_VARIABLE, mode.ALIAS_VARIABLE)},
        "override": mode._override,
    }
    # in two parts: the ranks must set the parent's sys.path before they unpickle the function
    return pickle.dumps((state, dumps((fn, args))))


_pools: dict[str, RankPool] = {}
pool_lock = threading.RLock()  # one call at a time, from any thread


def shared_pool(size: int, device: str) -> RankPool:
    """The process-wide pool for a kind of device, with at least `size` ranks; a smaller one is replaced."""
    pool = _pools.get(device)
    if pool is None or pool.size < size or not pool.is_own:
        discard_pool(device)
        pool = _pools[device] = RankPool(size, device)
    return pool


def discard_pool(device: str) -> None:
    """Ends the pool for a kind of device, if there is one: the next case starts a new one."""
    pool = _pools.pop(device, None)
    if pool is not None:
        pool.close()


@atexit.register
def _discard_all() -> None:
    for device in list(_pools):
        discard_pool(device)
    while _starters:
        _starters.pop().end()
