"""The watch for groups on NCCL, here without NCCL: which ends of ranks the others report, and in what order."""

import contextlib
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_invariant.comm import liveness, watch

WORKER = Path(__file__).parents[1] / "helpers" / "watch_worker.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """said(run, rank): the lines of that rank's stderr that this library wrote."""
    folder = tmp_path_factory.mktemp("watch")
    done = subprocess.run([sys.executable, str(WORKER), str(folder)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr

    def lines(run, rank):
        text = Path(folder, run, str(rank)).read_text()
        assert "atexit" not in text, text
        return [line for line in text.splitlines() if line.startswith("tp_invariant: ")]

    return lines


def name(rank):
    return rf"rank {rank} \(global rank {rank}, process \d+ on \S+\)"


ADVICE = (
    r"\. Collectives with it cannot finish: some time after the group's time-out of 600 s torch's NCCL watchdog ends "
    r"this process \(with TORCH_NCCL_BLOCKING_WAIT=1 they raise an error then\)\. Look for the first error or signal "
    r"in the output of rank (\d), then restart all ranks from the last checkpoint"
)


def test_the_first_death_is_named_and_those_after_it(said):
    """1 is killed, 2 raises, 3 ends well; 4 raises after all this was reported, and has received the reports."""
    first, second = said("deaths", 0)
    match = re.fullmatch(rf"tp_invariant: {name(1)} has ended; {name(2)} ended after{ADVICE}", first)
    assert match and match[1] == "1", first
    assert re.fullmatch(rf"tp_invariant: {name(4)} ended after rank 1, most likely for the same reason", second), second
    assert [line.partition(" has ended")[0] for line in said("deaths", 4)] == [first.partition(" has ended")[0]]
    assert said("deaths", 3) == [], "it had ended before the grace was over"


@pytest.mark.parametrize("run, who", [("an exception", 2), ("in multiprocessing", 1), ("a child outlives it", 1)])
def test_a_death_is_named(said, run, who):
    """By an exception; by an exit status in a child of multiprocessing; while a child of the dead rank is alive."""
    (line,) = said(run, 0)
    match = re.fullmatch(rf"tp_invariant: {name(who)} has ended{ADVICE}", line)
    assert match and match[1] == str(who), line


@pytest.mark.parametrize("run, ranks", [("good ends", 5), ("all are ended", 2)])
def test_nothing_is_reported(said, run, ranks):
    """If all end well one after another, also children of one; and for a death just before this rank ends."""
    assert [said(run, rank) for rank in range(ranks)] == [[]] * ranks


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(liveness, "_socket", None)
    monkeypatch.setattr(liveness, "_failure_reports", {})
    monkeypatch.setattr(liveness.dist, "get_rank", lambda: 0)
    yield liveness.own_contact()
    liveness.close_socket(goodbye=False)


@pytest.mark.parametrize("goodbye", [True, False])
def test_reports_are_read_beside_the_connections_of_watchers(own, goodbye):
    watchers = [liveness.connect(own, liveness.WATCHING)]
    assert liveness._probe(own, "2:1\n") == "alive"
    watchers.append(liveness.connect(own, liveness.WATCHING))
    before = time.monotonic()
    liveness._read_failure_reports()
    assert time.monotonic() - before < 0.5
    assert liveness._failure_reports == {2: {1}}
    watchers.append(liveness.connect(own, liveness.WATCHING))  # still in the queue at the end
    for watcher in watchers:
        watcher.setblocking(False)
        with pytest.raises(BlockingIOError):  # held, with nothing said
            watcher.recv(64)
    liveness.close_socket(goodbye=goodbye)
    for watcher in watchers:
        with watcher, contextlib.nullcontext() if goodbye else contextlib.suppress(ConnectionResetError):
            watcher.settimeout(5)
            assert watcher.recv(64) == (liveness.GOODBYE if goodbye else b"")
    assert liveness._probe(own, "") == "ended"


@pytest.mark.parametrize(
    "config, size, options, watched, seconds",
    [
        ("cpu:gloo,cuda:nccl", 3, dict(options=SimpleNamespace(_timeout=timedelta(seconds=20))), [2, 0], 20.0),
        ("cuda:nccl", 100, {}, [*range(2, 66)], None),  # a backend that does not tell its time-out; the next 64
        ("cpu:gloo,cuda:gloo", 3, {}, None, None),
        ("cuda:nccl", 1, {}, None, None),
    ],
)
def test_groups_on_nccl_are_watched(monkeypatch, config, size, options, watched, seconds):
    calls = []
    monkeypatch.setattr(watch, "watch", lambda others, seconds: calls.append((list(others), seconds)))
    monkeypatch.setattr(watch.dist, "get_backend_config", lambda process_group: config)
    process_group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(**options))
    watch.watch_group(list(range(size)), SimpleNamespace(process_group=process_group, rank=1, size=size))
    assert calls == ([] if watched is None else [(watched, seconds)])


def test_ranks_that_cannot_be_reached_are_not_watched(monkeypatch, own, capsys):
    """A rank that could not listen, one on the loopback of another host, one that has ended. The others are watched."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    here = liveness._network()
    contacts = [
        liveness.Contact(1, 1, "h", here, "127.0.0.1", 0),
        liveness.Contact(2, 1, "h", "another", "127.0.0.1", own.port),
        liveness.Contact(3, 1, "h", here, "127.0.0.1", port),
        own,
        own,  # of another group
    ]
    watcher = watch._Watcher()
    watcher.add(contacts, None)
    watcher._poll_once()
    assert [key.data for key in watcher._selector.get_map().values()] == [None, (own, None)]
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 0.0)
    liveness.close_socket(goodbye=False)
    watcher._poll_once()
    watcher.close()
    out, err = capsys.readouterr()
    assert err.startswith("tp_invariant: rank 0 (global rank 0, ") and "the group's time-out torch's" in err
    assert err.count("\n") == 1 and not out


def test_an_error_of_the_watch_ends_the_watch_alone(monkeypatch, capsys):
    watcher = watch._Watcher()
    monkeypatch.setattr(watcher, "_poll_once", lambda: 1 / 0)
    watcher.start()
    watcher.join(timeout=5)
    watcher.close()
    unwatched = "tp_invariant: ranks that end will not be named: "
    assert capsys.readouterr().err == f"{unwatched}ZeroDivisionError: division by zero\n"

    def no_more(*args):
        raise OSError("too many open files")

    monkeypatch.setattr(watch, "watch", no_more)
    monkeypatch.setattr(watch.dist, "get_backend_config", lambda process_group: "cuda:nccl")
    watch.watch_group([0, 1], SimpleNamespace(process_group=object(), rank=1, size=2))
    assert capsys.readouterr().err == f"{unwatched}too many open files\n"
