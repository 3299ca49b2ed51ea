"""The ranks of the runs of test_watch.py, without torch.distributed: forked from one process, as importing takes long.

python watch_worker.py FOLDER       writes each rank's stderr to FOLDER/run/rank, for each of RUNS, side by side

Each step waits for an event (a rank has ended, a line was written) and none for a point in time, so that a loaded
machine makes the runs longer and changes nothing that is said.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from tp_invariant.comm import liveness, watch

fork = multiprocessing.get_context("fork")
LONG = 600.0  # seconds: a grace that no run outlasts
PATIENCE = 400.0  # seconds that a rank waits for an event
contacts = []  # of the ranks of this run
own_stderr = None  # of this rank


def wait(event):
    end = time.monotonic() + PATIENCE
    while not event():
        if time.monotonic() > end:
            os.write(2, b"the event that this rank waits for did not happen\n")
            os._exit(1)
        time.sleep(0.02)


def has_ended(rank):
    """Whether the process of the rank has ended, waited for by its parent or not."""

    def look():
        try:
            stat = Path(f"/proc/{contacts[rank].process}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] == "Z"

    return look


def has_said(lines):
    """Whether the watch of this rank has written that many lines."""
    return lambda: own_stderr.read_text().count("tp_invariant: ") >= lines


def grace_is_over(deaths):
    """An event: that many ranks are known to have ended, and the watch has said so, as if the grace were over."""

    def look():
        watcher = watch._watcher
        if len(watcher._ended) != deaths:
            return False
        watcher._deadline = 0.0
        watcher._wake_sender.send(b"\0")
        return True

    return look


def ends(*events):
    return lambda: [wait(event) for event in events]


def raises(*events, error=ValueError):
    def run():
        ends(*events)()
        raise error(3)

    return run


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def has_children(event, and_then):
    """One forked by hand, which leaves through the interpreter, and one of multiprocessing."""

    def run():
        if not os.fork():
            wait(event)
            sys.exit()
        fork.Process(target=ends()).start()
        and_then()

    return run


def after_a_while(event):
    """The event, and then two seconds in which the watch would have written a line if it had one."""

    def run():
        wait(event)
        time.sleep(2.0)

    return run


def in_multiprocessing(run):
    """The rank is a child of multiprocessing, which leaves by os._exit."""
    run.in_multiprocessing = True
    return run


def with_grace(seconds, run):
    run.grace = seconds
    return run


# what ranks 0, 1, .. do; the grace is two seconds where none is given
RUNS = {
    "deaths": [
        with_grace(LONG, ends(grace_is_over(2), has_said(1), grace_is_over(1), has_said(2))),
        is_killed,
        raises(has_ended(1)),
        with_grace(LONG, ends(has_ended(1))),
        with_grace(LONG, raises(grace_is_over(2), has_said(1))),
    ],
    "an exception": [ends(has_said(1)), ends(), raises(has_ended(1))],
    "in multiprocessing": [
        ends(has_said(1)),
        in_multiprocessing(raises(has_ended(2), error=SystemExit)),
        in_multiprocessing(ends()),
    ],
    "good ends": [
        with_grace(0.5, after_a_while(has_ended(4))),
        ends(),
        in_multiprocessing(ends(has_ended(1))),
        has_children(has_ended(2), ends(has_ended(2))),
        with_grace(0.5, ends(has_ended(3))),
    ],
    "a child outlives it": [ends(has_said(1)), has_children(has_ended(0), is_killed)],
    "all are ended": [with_grace(LONG, ends(has_ended(1))), is_killed],
}


def be_rank(folder, rank, world, run):
    global own_stderr
    own_stderr = folder / str(rank)
    os.dup2(os.open(own_stderr, os.O_WRONLY | os.O_CREAT), 2)
    watch._GRACE_SECONDS = getattr(run, "grace", watch._GRACE_SECONDS)
    liveness.dist.get_rank = lambda: rank
    (folder / f"{rank}.part").write_bytes(liveness.own_contact().encode())
    (folder / f"{rank}.part").rename(folder / f"{rank}.contact")
    files = [folder / f"{other}.contact" for other in range(world)]
    wait(lambda: all(file.exists() for file in files))
    contacts[:] = [liveness.Contact.decode(file.read_bytes()) for file in files]
    watch.watch(contacts[:rank] + contacts[rank + 1 :], 600.0)
    wait(lambda: len(watch._watcher._known) == world - 1)  # connected
    (folder / f"{rank}.ready").touch()
    wait(lambda: all((folder / f"{other}.ready").exists() for other in range(world)))
    run()


def main():
    """A forked rank returns from here, and leaves through the interpreter as a main program does."""
    gc.freeze()  # else each rank, as it leaves, copies all of torch's objects, which it shares with its parent
    ranks = []
    for name, runs in RUNS.items():
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        ranks += [(folder, rank, len(runs), run) for rank, run in enumerate(runs)]
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
