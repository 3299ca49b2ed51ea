"""A program whose last gather is still on its way when it ends: it ends with status 0."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from tp_invariant.comm.collectives import resolve_group, start_all_gather

own, rank, seconds = sys.argv[1] == "own", int(sys.argv[2]), float(sys.argv[3])
store = dist.TCPStore("127.0.0.1", int(sys.argv[4]), 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = resolve_group(dist.group.WORLD)

def gather(wait):
    x, y = torch.ones(1000), torch.empty(2000)
    if own:
        work = start_all_gather(y, x, group)
    else:
        work = dist.all_gather_into_tensor(y, x, async_op=True)
    if wait:
        work.wait()

gather(True)
if rank == 1:
    time.sleep(seconds)
gather(False)
"""


def statuses(kind, seconds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, "-c", PROGRAM, kind, str(rank), str(seconds), port] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for command in commands]
    return [process.wait(timeout=120) for process in ranks]


def test_programs_end():
    for seconds in (0.0, 0.02, 0.1, 0.5):
        assert statuses("own", seconds) == [0, 0]
