"""One rank of a pool (rank_pool.py): a process that runs cases for its parent and sends back their results.

And the process that starts it, which has imported what ranks need, and forks them: an import of torch takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ..consistency import agreement
from ..core import mode
from ..core.processes import end_with_parent
from ..core.torch_private import count_groups_from
from ..core.variables import RANK_DEVICE_VARIABLE
from ..gemm.gemm_fn import set_default_gemm_fn
from ..gemm.tokens import shared_tokens
from ..gemm.weights import weight_cache
from .rank_pool import Outcome, dumps

_MOST_DESCRIPTORS = 253  # that the kernel passes with one message


def start_ranks(requests: int) -> None:
    """Forks the ranks of one pool after another, as the parent asks through the socket `requests`, until it ends.

    Nothing here may start a thread or touch a GPU: the ranks would be forked without the one and with half the other.
    """
    requests_socket, parent = socket.socket(fileno=requests), os.getppid()
    os.set_inheritable(requests, False)
    messages = Connection(os.dup(requests))
    while os.getppid() == parent:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not messages.poll(1.0):
            continue
        length, descriptors, _, _ = socket.recv_fds(requests_socket, 8, _MOST_DESCRIPTORS)
        if not length:
            return
        for descriptor in descriptors:  # a process that an import or a case starts must not keep it open
            os.set_inheritable(descriptor, False)
        request = requests_socket.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
        size, ranks, environment, folder, modules = pickle.loads(request)
        for module in modules:
            importlib.import_module(module)
        gc.freeze()  # so that the collector of a rank does not write to, and so copy, every page of what was imported
        if os.fork() == 0:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            messages.close()
            requests_socket.close()
            _fork_ranks(size, descriptors[0], dict(zip(ranks, descriptors[1:], strict=True)))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_ranks(size: int, reports: int, descriptors: dict[int, int]) -> None:
    """Forks a process for each rank of `descriptors`, rank -> descriptor, and reports how each of them ended."""
    starter = os.getppid()
    os.setsid()
    connection, pids = Connection(reports), {}
    connection.send_bytes(pickle.dumps((None, os.getpid())))
    while descriptors:
        rank, descriptor = descriptors.popitem()
        pid = os.fork()
        if pid == 0:
            for others in descriptors.values():
                os.close(others)
            try:
                serve(descriptor, rank, size)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        pids[pid] = rank
        os.close(descriptor)
    end_with_parent(starter)
    while pids:
        pid, status = os.wait()
        connection.send_bytes(pickle.dumps((pids.pop(pid), os.waitstatus_to_exitcode(status))))


def serve(descriptor: int, rank: int, size: int) -> None:
    """Runs the work that the parent sends through the socket `descriptor`, until the parent ends."""
    device = os.environ[RANK_DEVICE_VARIABLE]
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "cpu:gloo,cuda:nccl"
        if size > gpus:  # ranks share GPUs: NCCL refuses that, symmetric memory needs the variable
            backend = "gloo"
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    end_with_parent()
    connection = Connection(descriptor)
    connection.send_bytes(b"running")
    timeout = timedelta(minutes=10)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    groups: dict[int, Any] = {}
    for call in itertools.count(1):
        try:
            world_size = pickle.loads(connection.recv_bytes())
        except EOFError:  # the parent has ended
            os._exit(0)
        # groups that some ranks alone make in a case would leave the counts different, and so later groups' names
        count_groups_from(call << 20)
        if world_size not in groups:  # every rank takes part in making a group
            groups[world_size] = dist.new_group(list(range(world_size)))
        if rank >= world_size:
            continue
        outcome = Outcome()
        try:
            message = connection.recv_bytes()
            with _case_state(message) as (fn, args):
                outcome.value = fn(groups[world_size], *args)
        except BaseException as error:
            outcome.error, outcome.trace = error, traceback.format_exc()
        connection.send_bytes(_dump_outcome(outcome))


@contextlib.contextmanager
def _case_state(message: bytes) -> Iterator[tuple[Callable, tuple]]:
    """Yields the case in `message` with the parent's state set; resets the settings of the case afterwards."""
    state, case = pickle.loads(message)
    sys.path[:] = state["path"]
    fn, args = pickle.loads(case)
    for name, value in state["variables"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    agreement.forget_layers()  # after a failed case the ranks may have created different numbers of layers
    torch.manual_seed(0)  # after a case of fewer ranks they would draw different weights
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    ahead = weight_cache.keep, weight_cache.ahead, weight_cache.ahead_in_graphs, shared_tokens.enabled
    try:
        with mode.set_tp_invariant_mode(state["override"]):
            yield fn, args
    finally:
        set_default_gemm_fn(None)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        weight_cache.keep, weight_cache.ahead, weight_cache.ahead_in_graphs, shared_tokens.enabled = ahead
        weight_cache.clear()


def _dump_outcome(outcome: Outcome) -> bytes:
    """The outcome as bytes that the parent can load: some exceptions can be pickled but not unpickled."""
    try:
        message = dumps(outcome)
        pickle.loads(message)
        return message
    except Exception as error:
        if outcome.error is not None:
            replacement: Exception = RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")
        else:
            replacement = TypeError(f"the result cannot be sent back: {error}")
        return pickle.dumps(Outcome(error=replacement, trace=outcome.trace))
