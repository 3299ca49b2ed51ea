"""Folders of processes that were killed: the next process removes them, and does not touch other processes' folders."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tp_invariant.core import processes
from tp_invariant.core.processes import how_it_ended, temporary_folder

FOLDER = str(Path(processes.__file__).parent)
HOLDS = """
import sys
sys.path.insert(0, sys.argv[1])  # the file alone: the package takes seconds to import
from processes import temporary_folder
with temporary_folder("test") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_goes_with_its_block():
    with pytest.raises(OSError, match="inside"), temporary_folder("test") as folder:
        (folder / "a" / "b").mkdir(parents=True)
        raise OSError("inside")
    assert not folder.exists()


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path):
    other = tmp_path / "tp_invariant_test_without_owner"
    other.mkdir()
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, FOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    dead, alive = (tmp_path / process.stdout.readline().strip() for process in owners)
    try:
        owners[0].kill()
        owners[0].wait()
        assert (dead / "file").exists(), "a process that is killed removes nothing"
        with temporary_folder("other"):
            assert dead.exists(), "of another purpose"
        with temporary_folder("test") as own:
            assert not dead.exists() and (alive / "file").exists() and other.exists() and own.exists()
    finally:
        for process in owners:
            process.communicate("")
    assert not alive.exists() and sorted(tmp_path.iterdir()) == [other]


def test_how_processes_end():
    assert how_it_ended(-signal.SIGILL) == "ended by SIGILL"
    assert how_it_ended(-200) == "ended by signal 200"
    assert how_it_ended(3) == "ended with status 3"
