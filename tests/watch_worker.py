"""The ranks of the runs of test_watch.py, without torch.distributed: forked from one process, as importing takes long.

python watch_worker.py FOLDER       writes each rank's stderr to FOLDER/run/rank, for each of RUNS, side by side
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from tp_invariant import liveness, watch

fork = multiprocessing.get_context("fork")
LAST = 6.2  # seconds after the start of a run; rank 0 ends
start = 0.0  # of this rank's run


def until(seconds):
    time.sleep(max(0.0, start + seconds - time.time()))


def ends(at):
    return lambda: until(at)


def raises(at, error=ValueError):
    def run():
        until(at)
        raise error(3)

    return run


def is_killed(at):
    def run():
        until(at)
        os.kill(os.getpid(), signal.SIGKILL)

    return run


def has_children(until_when, and_then):
    """One forked by hand, which leaves through the interpreter, and one of multiprocessing."""

    def run():
        if not os.fork():
            until(until_when)
            sys.exit()
        fork.Process(target=ends(0.3)).start()
        and_then()

    return run


def in_multiprocessing(run):
    """The rank is a child of multiprocessing, which leaves by os._exit."""
    run.in_multiprocessing = True
    return run


# what ranks 1, 2, .. do; rank 0 ends well at LAST
RUNS = {
    "deaths": [is_killed(0.3), raises(0.8), ends(0.5), raises(3.0)],
    "an exception": [ends(0.2), raises(0.4)],
    "in multiprocessing": [in_multiprocessing(raises(0.4, SystemExit)), in_multiprocessing(ends(0.2))],
    "good ends": [ends(0.1), in_multiprocessing(ends(0.3)), has_children(0.4, ends(1.2)), ends(1.4)],
    "a child outlives it": [has_children(LAST + 1, is_killed(0.6))],
    "all are ended": [is_killed(LAST - 0.3)],
}


def be_rank(folder, rank, world, run):
    global start
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)
    liveness.dist.get_rank = lambda: rank
    (folder / f"{rank}.part").write_bytes(liveness.own_contact().encode())
    (folder / f"{rank}.part").rename(folder / f"{rank}.contact")
    files = [folder / f"{other}.contact" for other in range(world)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    contacts = [liveness.Contact.decode(file.read_bytes()) for file in files]
    watch.watch(contacts[:rank] + contacts[rank + 1 :], 600.0)
    start = max(file.stat().st_mtime for file in files) + 0.5  # by then all have connected
    run()


def main():
    """A forked rank returns from here, and leaves through the interpreter as a main program does."""
    ranks = []
    for name, others in RUNS.items():
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        ranks += [(folder, rank, 1 + len(others), run) for rank, run in enumerate([ends(LAST), *others])]
    children = []
    for arguments in ranks:  # first these: a process forked by hand would take those of multiprocessing for its own
        if not hasattr(arguments[-1], "in_multiprocessing"):
            child = os.fork()
            if not child:
                return be_rank(*arguments)
            children.append(child)
    for arguments in ranks:
        if hasattr(arguments[-1], "in_multiprocessing"):
            fork.Process(target=be_rank, args=arguments).start()
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
