"""The digest of the kernels' sources, by which ranks see that one of them runs other kernels."""

import shutil
from pathlib import Path

import pytest

from tp_invariant import kernels
from tp_invariant.consistency import environment

FOLDER = Path(kernels.__path__[0])
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the kernels' folder, in which the digest is taken."""
    folder = tmp_path / "kernels"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernels, "__path__", [str(folder)])
    return folder


def digest():
    return environment._kernel_sources.__wrapped__()  # the cache knows nothing of what is changed here


def test_a_copy_has_the_same_digest(copied, monkeypatch):
    of_copy = digest()
    monkeypatch.undo()
    assert digest() == of_copy


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_noticed(copied, name):
    before = digest()
    (copied / name).write_text((copied / name).read_text() + "# changed\n")
    assert digest() != before


def test_a_file_in_a_new_folder_is_noticed(copied):
    before = digest()
    (copied / "new").mkdir()
    (copied / "new" / "kernel.py").write_text("")
    in_a_folder = digest()
    assert in_a_folder != before
    (copied / "new").rename(copied / "renamed")
    assert digest() not in (before, in_a_folder)


def test_what_is_no_source_does_not_count(copied):
    before = digest()
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "launch.cpython-311.pyc").write_bytes(b"")
    assert digest() == before
