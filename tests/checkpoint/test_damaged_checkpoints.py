"""Damaged checkpoints, files of another save, and old versions: a load raises an error that names the file, and changes
no byte of the model. Also ranks whose copies of replicated tensors differ."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meshes import new_group
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune

import tp_invariant as tpi
from tp_invariant.checkpoint import files as checkpoint_files
from tp_invariant.checkpoint import plan as checkpoint_plan
from tp_invariant.checkpoint.files import FORMAT
from tp_invariant.testing import RankError, assert_bitwise_equal, digest

OLD = Path(__file__).parent / "checkpoint_0.1.0"  # written by that version, at TP=2
OLD_MODEL = "b3958e5186236bcbd3dd9b2dbf861e4b36584841fb5f93629e84693021fe46bf"
OLD_STATE = "ae57af5a0981a09ff849b1fdbba2a60ae5a35c74081a6c9e6b68756db56a0b62"


class Model(nn.Module):
    def __init__(self, tp_group, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = tpi.Linear(4, 8, parallel_mode="column", partition_stride=2, tp_group=tp_group)
        self.down = tpi.Linear(8, 4, bias=False, parallel_mode="row", tp_group=tp_group)
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, x):
        return self.down(self.up(x))


def make(tp_group, seed=0, kind=torch.optim.AdamW, **options):
    model = Model(tp_group, seed)
    optimizer = kind(model.parameters(), lr=0.1 + seed, **options)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def bytes_of(model, optimizer):
    state = [dict(optimizer.state.get(parameter, {})) for parameter in model.parameters()]
    return digest([dict(model.state_dict()), state])


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of one rank, and the saved values."""
    model, optimizer = make(None)
    tpi.checkpoint.save(tmp_path / "c", model, optimizer, extra={"step": 7, "rng": torch.arange(3)})
    return tmp_path / "c", bytes_of(model, optimizer)


def refused(folder, match, error=ValueError, **options):
    """Asserts that a load raises an error with this text, and changes nothing."""
    model, optimizer = make(None, seed=1, **options)
    before = bytes_of(model, optimizer)
    with pytest.raises(error, match=match) as caught:
        tpi.checkpoint.load(folder, model, optimizer)
    assert type(caught.value) is error
    assert bytes_of(model, optimizer) == before and optimizer.param_groups[0]["lr"] == 1.1
    return str(caught.value)


def rewrite(folder, change, *, sign=True):
    """Changes the index; with `sign` it gets a new valid digest, as if `save` had written it."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    if sign and index["format"] == FORMAT:
        index["digest"] = checkpoint_files._index_digest(index)
    path.write_text(json.dumps(index))


# --- one bit, another save, another tensor --------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_the_data(saved):
    folder, held = saved
    data = next(folder.glob("*.safetensors"))
    content = data.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for place in (start, (start + len(content)) // 2, len(content) - 1):
        broken = bytearray(content)
        broken[place] ^= 1
        data.write_bytes(broken)
        refused(folder, rf"{data.name} is damaged: .*@.* does not have the digest that index\.json holds")
    data.write_bytes(content)
    model, optimizer = make(None, seed=1)
    assert tpi.checkpoint.load(folder, model, optimizer)["step"] == 7
    assert bytes_of(model, optimizer) == held  # the control: what is whole loads


def load_on_ranks(tp_group, folder):
    """(the error of load, whether anything changed)"""
    model, optimizer = make(tp_group, seed=1)
    before, error = bytes_of(model, optimizer), None
    try:
        tpi.checkpoint.load(folder, model, optimizer)
    except Exception as raised:
        error = raised
    return error, bytes_of(model, optimizer) != before


def save_on_ranks(tp_group, folder):
    model, optimizer = make(tp_group)
    tpi.checkpoint.save(folder, model, optimizer)


def test_damage_that_only_one_rank_reads_is_an_error_on_all(tmp_path):
    run_ranks(save_on_ranks, 2, str(tmp_path))
    data = next(tmp_path.glob("*-00001-*.safetensors"))
    with safe_open(data, framework="pt") as boxes:
        inside = boxes.get_tensor("model.down.weight@0,4").numpy().tobytes()
    content = bytearray(data.read_bytes())
    content[content.index(inside)] ^= 128
    data.write_bytes(content)
    for error, changed in run_ranks(load_on_ranks, 2, str(tmp_path)):
        assert type(error) is ValueError and not changed
        assert f"rank 1 of 2: ValueError: {data} is damaged" in str(error)
        assert "rank 0 of 2" not in str(error)


def test_a_file_of_another_save_under_the_right_name(saved, tmp_path):
    folder, _ = saved
    tpi.checkpoint.save(tmp_path / "d", *make(None, seed=3), extra={"step": 7, "rng": torch.arange(3)})
    ours, other = next(folder.glob("*.safetensors")), next((tmp_path / "d").glob("*.safetensors"))
    shutil.copy(other, ours)
    refused(folder, rf"{ours.name} is not of the save that index\.json names")
    boxes = load_file(other)
    save_file(boxes, ours, metadata={"save": ours.name[:16]})  # one that says that it is
    refused(folder, rf"{ours.name} is damaged")
    ours.unlink()
    refused(folder, rf"{ours.name} does not exist, but index\.json names it")


def test_a_changed_index_is_refused(saved):
    folder, _ = saved

    def change(index):
        index["tensors"]["model.up.bias"]["boxes"][0]["file"] = "../x.safetensors"

    whole = (folder / "index.json").read_text()
    rewrite(folder, change, sign=False)
    refused(folder, "index.json cannot be read as a checkpoint's index: it is not what was saved")
    (folder / "index.json").write_text(whole)
    rewrite(folder, change)
    assert str(folder) in refused(folder, "index.json.*: .*not the name of a data file")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "\udcff", "[" * 10**5, '{"format": 1, "format": 2}', "NaN"],
    ids=str.__len__,
)
def test_text_that_is_not_an_index(saved, text):
    folder, _ = saved
    (folder / "index.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(folder, "index.json cannot be read as a checkpoint's index: ")


def test_any_change_of_a_data_file_is_refused_or_without_effect(saved):
    folder, held = saved
    data = next(folder.glob("*.safetensors"))
    content = data.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    model, optimizer = make(None, seed=1)
    tpi.checkpoint.load(folder, model, optimizer)
    seen = {"refused": 0, "the same": 0}

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(
        st.one_of(st.integers(0, 7), st.integers(0, header - 1), st.integers(0, len(content) - 1)),
        st.integers(0, 7),
        st.sampled_from(["flip", "flip", "flip", "cut", "insert", "append"]),
    )
    def check(place, bit, how):
        broken = bytearray(content)
        if how == "flip":
            broken[place] ^= 1 << bit
        elif how == "cut":
            del broken[place:]
        elif how == "insert":
            broken.insert(place, bit)
        else:
            broken += bytes([bit] * (place + 1))
        data.write_bytes(broken)
        try:
            tpi.checkpoint.load(folder, model, optimizer)
            seen["the same"] += 1
        except ValueError as error:
            assert str(data) in str(error)
            seen["refused"] += 1
        assert bytes_of(model, optimizer) == held

    check()
    assert seen["refused"] > 100  # what is left: "format" in the header's metadata, which nobody reads


# --- optimizers -----------------------------------------------------------------------------------------------------


def test_another_optimizers_state(saved):
    folder, held = saved
    message = "does not fit this SGD:\nit is a state of AdamW"
    refused(folder, message, kind=torch.optim.SGD, momentum=0.9)
    refused(folder, r"param_groups\[0\] has amsgrad=False against amsgrad=True", amsgrad=True)
    refused(folder, r"param_groups\[0\] has maximize=False against maximize=True", maximize=True)
    model, optimizer = make(None, seed=1, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-5, foreach=True)
    tpi.checkpoint.load(folder, model, optimizer)  # the control: a schedule changes such
    assert bytes_of(model, optimizer) == held and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    sgd = folder.parent / "sgd"
    tpi.checkpoint.save(sgd, *make(None, kind=torch.optim.SGD, momentum=0.9))
    refused(sgd, r"has momentum=0.9 against momentum=0", kind=torch.optim.SGD)


def test_full_optimizer_states_of_other_optimizers():
    states = {}
    for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        model, optimizer = make(None, kind=kind, **options)
        states[kind] = tpi.full_optimizer_state_dict(model, optimizer)
    model, optimizer = make(None, seed=1, kind=torch.optim.SGD, momentum=0.9)
    before = bytes_of(model, optimizer)
    for state, message in (
        (states[torch.optim.AdamW], "it is a state of AdamW"),
        ({}, "has no optimizer state"),
        ({"state": [], "param_groups": []}, "has no optimizer state"),
    ):
        with pytest.raises(ValueError, match=message):
            tpi.load_full_optimizer_state_dict(model, optimizer, state)
        assert bytes_of(model, optimizer) == before
    tpi.load_full_optimizer_state_dict(model, optimizer, states[torch.optim.SGD])
    assert_bitwise_equal(tpi.full_optimizer_state_dict(model, optimizer), states[torch.optim.SGD])


def test_parameters_reordered_frozen_scheduled_and_removed(tmp_path):
    model = Model(None)
    model.up.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    tpi.checkpoint.save(tmp_path / "c", model, optimizer)
    other = Model(None, seed=1)
    reverse = torch.optim.AdamW(list(other.parameters())[::-1], lr=0.3)
    tpi.checkpoint.load(tmp_path / "c", other, reverse)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_bitwise_equal(dict(reverse.state.get(theirs, {})), dict(optimizer.state.get(mine, {})))
    assert reverse.param_groups[0]["lr"] == 0.05 and reverse.param_groups[0]["initial_lr"] == 0.1
    assert other.up.bias not in reverse.state
    optimizer.param_groups[0]["params"].pop()  # down.weight, whose state stays behind in the optimizer
    tpi.checkpoint.save(tmp_path / "d", model, optimizer)
    less = torch.optim.AdamW([other.up.weight, other.up.bias])
    tpi.checkpoint.load(tmp_path / "d", other, less)
    assert list(less.state) == [other.up.weight]
    rewrite(tmp_path / "c", lambda i: i["values"]["optimizer"]["groups"][0]["params"].remove("down.weight"))
    with pytest.raises(ValueError, match=r"state of parameters that are in none of its groups: down\.weight"):
        tpi.checkpoint.load(tmp_path / "c", other, less)


# --- old versions ---------------------------------------------------------------------------------------------------


def load_old(tp_group, folder):
    model, optimizer = make(tp_group, seed=1)
    extra = tpi.checkpoint.load(folder, model, optimizer)
    return extra, tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


def test_a_checkpoint_of_the_first_release_loads():
    for world in (1, 4):
        for extra, model, optimizer in run_ranks(load_old, world, str(OLD)):
            assert extra["step"] == 7
            assert_bitwise_equal(extra["rng"], torch.arange(3))
            assert digest(model) == OLD_MODEL and digest(optimizer["state"]) == OLD_STATE
            assert optimizer["param_groups"][0]["lr"] == 0.5


def test_a_format_from_before_it_is_refused_by_name(saved):
    rewrite(saved[0], lambda index: index.update(format="tp_invariant checkpoint 1"), sign=False)
    refused(saved[0], "its format is 'tp_invariant checkpoint 1', and this version reads 'tp_invariant checkpoint 2'")


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_save_follows_no_symbolic_links(saved, tmp_path):
    folder, held = saved
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("index.json.new", "index.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        tpi.checkpoint.save(folder, *make(None))
        assert victim.read_text() == "precious" and not (folder / name).is_symlink()
    (folder / "save.lock").symlink_to(victim)
    with pytest.raises(RuntimeError, match=r"rank 0 of 1: OSError: .*save\.lock"):
        tpi.checkpoint.save(folder, Model(None))
    assert victim.read_text() == "precious"
    (folder / "save.lock").unlink()
    (tmp_path / "link").symlink_to(folder)  # a folder's link is its owner's own: "latest", say
    model, optimizer = make(None, seed=1)
    tpi.checkpoint.load(tmp_path / "link", model, optimizer)
    assert bytes_of(model, optimizer) == held


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        tpi.checkpoint.save(tmp_path / "c", nn.Linear(2, 2))
    finally:
        os.umask(before)
    modes = {path.name[-5:]: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask} and len(modes) == 2


HOLD = """
import os, sys, time
import torch, tp_invariant as tpi
replace = os.replace
def wait(*args):
    print("ready", flush=True)
    time.sleep(600) if sys.argv[2] == "hang" else sys.stdin.read()
    replace(*args)
os.replace = wait
tpi.checkpoint.save(sys.argv[1], torch.nn.Linear(3, 3), extra={"step": "theirs"})
"""


def test_two_jobs_that_save_into_one_folder(tmp_path):
    """The second gets an error, and the first its checkpoint; a killed job blocks nobody."""
    model = nn.Linear(3, 3)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(RuntimeError, match=rf"another save into .* is under way, by process {other.pid} on "):
            tpi.checkpoint.save(tmp_path, model)
        other.communicate("", timeout=500)
        assert other.returncode == 0
    finally:
        other.kill()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert tpi.checkpoint.load(tmp_path, model) == {"step": "theirs"}
    killed = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "hang"], stdout=subprocess.PIPE, text=True)
    try:
        assert killed.stdout.readline() == "ready\n"
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert tpi.checkpoint.load(tmp_path, model) == {"step": "theirs"}
    tpi.checkpoint.save(tmp_path, model, extra={"step": "ours"})
    assert tpi.checkpoint.load(tmp_path, model) == {"step": "ours"}
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def without_locks(*args):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def test_a_filesystem_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_files.fcntl, "flock", without_locks)
    tpi.checkpoint.save(tmp_path, nn.Linear(2, 2))
    assert "has no locks" in caplog.text and not (tmp_path / "save.lock").exists()


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="file is a file: a checkpoint is a folder"):
        tpi.checkpoint.save(tmp_path / "file", model)
    with pytest.raises(FileNotFoundError, match="file is not a checkpoint: it is a file"):
        tpi.checkpoint.load(tmp_path / "file", model)
    tpi.checkpoint.save(tmp_path / "c", model, extra={"step": 1})
    listing = sorted(os.listdir(tmp_path / "c"))

    def full(*args):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_files.os, name, full)
            with pytest.raises(RuntimeError, match="No space left on device"):
                tpi.checkpoint.save(tmp_path / "c", model, extra={"step": 2})
        assert sorted(os.listdir(tmp_path / "c")) == listing  # what was half written does not fill the disk
    assert tpi.checkpoint.load(tmp_path / "c", model) == {"step": 1}


# --- tensors of all kinds -------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Buffers of every dtype that safetensors has, empty, strided, and views of one memory."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 4))
        for dtype in (torch.bool, torch.int64, torch.uint8, torch.uint16, torch.complex64, torch.float8_e4m3fn):
            self.register_buffer(str(dtype)[6:], torch.randint(0, 2, (3, 5)).to(dtype))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("turned", torch.randn(4, 3).t())
        memory = torch.randn(8)
        self.register_buffer("even", memory[::2])
        self.register_buffer("odd", memory[1::2])
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("infinite", torch.tensor([float("nan"), -0.0, float("inf")]))


def save_kinds(tp_group, folder):
    tpi.checkpoint.save(folder, Kinds(0), group=tp_group)


def load_kinds(tp_group, folder):
    model = Kinds(1)
    tpi.checkpoint.load(folder, model, group=tp_group)
    return digest(dict(model.state_dict()))


def test_tensors_of_every_kind(tmp_path, monkeypatch):
    run_ranks(save_kinds, 2, str(tmp_path / "two"))
    monkeypatch.setattr(checkpoint_plan, "_BLOCK_BYTES", 4)  # every row a block
    tpi.checkpoint.save(tmp_path / "one", Kinds(0))
    index = json.loads((tmp_path / "one" / "index.json").read_text())["tensors"]
    assert len(index["model.weight"]["boxes"]) == 6 and len(index["model.uint8"]["boxes"]) == 3
    for loaded in (load_kinds(None, tmp_path / "two"), *run_ranks(load_kinds, 2, str(tmp_path / "one"))):
        assert loaded == digest(dict(Kinds(0).state_dict()))
    assert digest(dict(Kinds(0).state_dict())) != digest(dict(Kinds(1).state_dict()))


def test_tensors_that_cannot_be_stored(tmp_path):
    for tensor, error, message in (
        (torch.zeros(2, dtype=torch.complex128), RuntimeError, "complex128"),
        (torch.zeros(2, 2).to_sparse(), TypeError, "b in the model's state dict is a torch.sparse_coo tensor"),
        (torch.zeros(2, device="meta"), RuntimeError, "meta"),
    ):
        model = nn.Linear(2, 2)
        model.register_buffer("b", tensor)
        with pytest.raises(error, match=message):
            tpi.checkpoint.save(tmp_path / "c", model)


# --- ranks that differ ----------------------------------------------------------------------------------------------


def outcome(call):
    try:
        return call()
    except Exception as error:
        return error


def save_differing(tp_group, folder, what):
    """The errors of save, full_state_dict and full_optimizer_state_dict if rank 1 holds another tensor."""
    model, optimizer = make(tp_group)
    model.plain = nn.LayerNorm(4)
    model.register_buffer("mean", torch.zeros(3))
    if tp_group.rank() == 1:
        with torch.no_grad():
            if what == "a parameter":
                model.plain.weight.view(torch.int32)[-1] ^= 1
            elif what == "a buffer":
                model.mean[1] = -0.0
            elif what == "a shape":
                model.mean = torch.zeros(4)
            elif what == "a name":
                model.register_buffer("more", torch.zeros(1))
            elif what == "a step":
                optimizer.state[model.up.weight]["step"] += 1
            elif what == "a rate":
                optimizer.param_groups[0]["lr"] = 0.2
    return (
        outcome(lambda: tpi.checkpoint.save(folder, model, optimizer)),
        outcome(lambda: tpi.full_state_dict(model) and None),
        outcome(lambda: tpi.full_optimizer_state_dict(model, optimizer) and None),
    )


@pytest.mark.parametrize(
    ("what", "saying", "others"),
    [
        ("nothing", None, "---"),
        ("a parameter", "model.plain.weight: one value on rank 0, another on rank 1", "xx-"),
        ("a buffer", "model.mean: one value on rank 0, another on rank 1", "xx-"),
        ("a shape", "model.mean: torch.float32 (3,) on rank 0; torch.float32 (4,) on rank 1", "xx-"),
        ("a name", "model.more: nothing on rank 0; torch.float32 (1,) on rank 1", "xx-"),
        ("a step", "optimizer.state.up.weight.step: one value on rank 0, another on rank 1", "x-x"),
        ("a rate", "differ in ['optimizer']['groups'][0]['lr'], which must be equal: 0.1 on rank 0; 0.2", "x--"),
    ],
)
def test_ranks_with_different_tensors_are_refused(tmp_path, what, saying, others):
    for results in run_ranks(save_differing, 2, str(tmp_path / "c"), what):
        assert "".join("-" if error is None else "x" for error in results) == others, results
        assert all(error is None or isinstance(error, RuntimeError) for error in results)
        if saying:
            assert saying in str(results[0])
            assert not (tmp_path / "c").exists()
        if others[1] == "x" and what != "a name":
            assert saying.removeprefix("model.") in str(results[1])


def own_pair(tp_group, *pairs):
    """The group of this rank's pair, created by its two ranks alone: the pool may have more ranks than tp_group."""
    return new_group(next(pair for pair in pairs if tp_group.rank() in pair))


def save_replica_differing(tp_group, folder):
    """Two replicas of two ranks each; one replica holds another shard."""
    model = Model(own_pair(tp_group, (0, 1), (2, 3)))
    tpi.checkpoint.save(folder, model, group=tp_group)
    if tp_group.rank() == 3:
        model.down.weight.data.view(-1)[0] += 1
    return outcome(lambda: tpi.checkpoint.save(folder, model, group=tp_group))


def test_replicas_with_different_shards_are_refused(tmp_path):
    for error in run_ranks(save_replica_differing, 4, str(tmp_path)):
        assert "part 1 of 2 of model.down.weight: one value on rank 1, another on rank 3" in str(error)
    model = Model(None, seed=1)
    tpi.checkpoint.load(tmp_path, model)
    assert_bitwise_equal(dict(model.state_dict()), dict(Model(None).state_dict()))


# --- what was lost in silence ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A padded embedding whose shards a plain module also holds, before or after it."""

    def __init__(self, tp_group, first, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        embedding = tpi.VocabParallelEmbedding(9, 4, pad_vocab_to_multiple_of=4, tp_group=tp_group)
        plain = nn.Linear(4, 1, bias=False)
        plain.weight = embedding.weight
        if first:
            self.plain, self.embedding = plain, embedding
        else:
            self.embedding, self.plain = embedding, plain


def through_both(tp_group, folder, first):
    model = Tied(tp_group, first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.plain.weight.grad = model.plain.weight.detach().clone()
    optimizer.step()
    tpi.checkpoint.save(folder, model, optimizer)
    return tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


def load_both(tp_group, folder, first):
    model = Tied(tp_group, first, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tpi.checkpoint.load(folder, model, optimizer)
    return tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("first", [True, False])
def test_an_embedding_tied_to_a_plain_module(tmp_path, first):
    alone = through_both(None, tmp_path / "1", first)
    assert alone[0]["plain.weight"].shape == (9, 4)
    for result in run_ranks(through_both, 2, str(tmp_path / "2"), first):
        assert_bitwise_equal(result, alone)
    assert_bitwise_equal(load_both(None, tmp_path / "2", first), alone)
    for result in run_ranks(load_both, 2, str(tmp_path / "1"), first):
        assert_bitwise_equal(result, alone)


def clone_weight(module, state, prefix, metadata):
    state[f"{prefix}weight"] = module.weight.detach().clone()


def parametrized(tp_group, folder, how):
    model = Model(tp_group)
    if how == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(model.up)
    elif how == "hooked":
        torch.nn.utils.weight_norm(model.up)
    elif how == "pruned":
        prune.l1_unstructured(model.down, "weight", amount=2)
    elif how == "cloned":
        model.up.register_state_dict_post_hook(clone_weight)
    return outcome(lambda: tpi.checkpoint.save(folder, model)), outcome(lambda: tpi.full_state_dict(model))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("how", ["parametrized", "hooked", "pruned", "cloned"])
def test_layers_whose_sharding_is_not_known(tmp_path, how):
    """What is in a parameter's place counts as whole, and differs between ranks."""
    for results in run_ranks(parametrized, 2, str(tmp_path / "c"), how):
        for error in results:
            assert isinstance(error, RuntimeError) and "different copies of replicated tensors" in str(error)
    errors = parametrized(None, tmp_path / "alone", how)  # at TP=1 they are whole, and say it
    assert errors[0] is None and isinstance(errors[1], dict)


class Mixed(nn.Module):
    """TP=4, TP=2 and whole layers."""

    def __init__(self, four, two, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 8)
        self.two = tpi.Linear(8, 8, parallel_mode="row", tp_group=two)
        self.four = tpi.Linear(8, 16, parallel_mode="column", partition_stride=2, tp_group=four)
        self.whole = tpi.Linear(16, 4, parallel_mode="column")


def mixed(tp_group, folder, saves, across=False):
    if across:
        model = Mixed(own_pair(tp_group, (0, 1), (2, 3)), own_pair(tp_group, (0, 2), (1, 3)))
        return outcome(lambda: tpi.full_state_dict(model))
    model = Mixed(tp_group, own_pair(tp_group, (0, 1), (2, 3)), seed=0 if saves else 1)
    if saves:
        tpi.checkpoint.save(folder, model)
    else:
        tpi.checkpoint.load(folder, model)
    full = tpi.full_state_dict(model)
    tpi.load_full_state_dict(model, full)
    return full, tpi.full_state_dict(model)


def test_models_of_layers_with_different_groups(tmp_path):
    expected = dict(Mixed(None, None).state_dict())
    tpi.checkpoint.save(tmp_path / "1", Mixed(None, None))
    for fulls in (*run_ranks(mixed, 4, str(tmp_path / "4"), True), *run_ranks(mixed, 4, str(tmp_path / "1"), False)):
        for full in fulls:
            assert_bitwise_equal(full, expected)
    model = Mixed(None, None, seed=1)
    tpi.checkpoint.load(tmp_path / "4", model)
    assert_bitwise_equal(dict(model.state_dict()), expected)
    for error in run_ranks(mixed, 4, "", True, True):
        assert isinstance(error, ValueError)
        assert "2 different tp_groups" in str(error) and "two.weight" in str(error) and "four.weight" in str(error)


def test_ranks_that_read_different_checkpoints(tmp_path):
    for name in ("a", "b"):
        tpi.checkpoint.save(tmp_path / name, *make(None))
    with pytest.raises(RankError) as raised:
        run_ranks(load_each_its_own, 2, str(tmp_path))
    for error in raised.value.errors.values():
        assert isinstance(error, ValueError) and "the ranks read different index.json" in str(error)


def load_each_its_own(tp_group, folder):
    tpi.checkpoint.load(f"{folder}/{'ab'[tp_group.rank()]}", *make(tp_group, seed=1))
