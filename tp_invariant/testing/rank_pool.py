"""A pool of rank processes that outlives many cases: starting eight takes many seconds, a case milliseconds.

Each rank is a fresh interpreter that runs rank_process.py's `serve`, with a connection to the parent for work and
results and a default process group among the ranks (gloo on CPUs, NCCL besides where there are GPUs). The connection is
a pair of sockets that the rank inherits one end of: it has no address, so nobody else can connect, and a parent that is
killed leaves no file behind. Groups of the first 1, 2, 3, .. ranks are made when first asked for. Functions travel by
cloudpickle where it is installed, so local ones work.
"""

from __future__ import annotations

import atexit
import os
import pickle
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

from ..core import mode
from ..core.processes import how_it_ended

_GRACE_SECONDS = 20.0  # how long the others get once one rank has failed
_START_SECONDS = 300.0  # starting is seconds on a free machine; a loaded one takes longer


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
    # modules that the ranks cannot import by name (test files under importlib mode, scripts) travel by value
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
    """Whether the ranks, which share our sys.path, get this module by its name."""
    top = name.partition(".")[0]
    if top == __name__.partition(".")[0]:
        return True  # an editable install is found by a hook of its own
    spec = PathFinder.find_spec(top) or BuiltinImporter.find_spec(top)
    return top != "__main__" and spec is not None and spec.origin == getattr(sys.modules[top], "__file__", spec.origin)


class RankPool:
    """`size` rank processes on one machine. See `testing.run_ranks` for use."""

    def __init__(self, size: int, device: str, threads: int = 1) -> None:
        self.size, self.device = size, device
        environment = dict(os.environ)
        environment.update(
            TP_INVARIANT_RANK_DEVICE=device,
            TP_INVARIANT_RANK_THREADS=str(threads),
            OMP_NUM_THREADS=str(threads),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_free_port()),
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        command = "import sys; from tp_invariant.testing.rank_process import serve; serve(*map(int, sys.argv[1:]))"
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        try:
            for rank in range(size):
                ours, theirs = socket.socketpair()
                self._connections.append(Connection(ours.detach()))
                with theirs:  # the rank's copy alone stays open, so that its end is noticed
                    # a session of their own, so that Ctrl-C reaches the parent alone, which then ends them
                    process = subprocess.Popen(
                        [sys.executable, "-c", command, str(theirs.fileno()), str(rank), str(size)],
                        env=environment,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                self._processes.append(process)
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    def _wait_for_all(self) -> None:
        """Until every rank has said that it runs."""
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
        """ "the process of rank 3 ended by SIGILL", or with which status it left."""
        try:
            status = self._processes[rank].wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"the process of rank {rank} has closed its connection"
        return f"the process of rank {rank} {how_it_ended(status)}"

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def run(self, work: bytes, world_size: int, timeout: float) -> list[Outcome | None]:
        """What `packed` made, on ranks 0 .. world_size - 1; None for a rank that did not answer in time."""
        # everybody hears of the group before anybody gets work: making a group takes all ranks, and work that is larger
        # than a socket's buffer waits for its rank to read it
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

    def close(self) -> None:
        """Ends the processes."""
        self._end_processes()
        for connection in self._connections:
            connection.close()


def packed(fn: Callable, args: tuple) -> bytes:
    """The call fn(tp_group, *args), to be sent to ranks."""
    # in two parts: functions are looked up on the parent's path, so that comes first
    return pickle.dumps((_parent_state(), dumps((fn, args))))


def _parent_state() -> dict[str, Any]:
    """What a case may count on finding as it is in the parent: the gate and the import path."""
    return {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "variables": {name: os.environ.get(name) for name in (mode.MODE_VARIABLE, mode.ALIAS_VARIABLE)},
        "override": mode._override,
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


_pools: dict[str, RankPool] = {}
pool_lock = threading.RLock()  # one call at a time, whichever thread it comes from


def shared_pool(size: int, device: str) -> RankPool:
    """The process-wide pool for a kind of device, with at least `size` ranks; a smaller one is replaced."""
    pool = _pools.get(device)
    if pool is None or pool.size < size:
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
