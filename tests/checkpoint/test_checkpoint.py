"""Full state dicts and checkpoints: written at one degree, read at another, byte for byte; failures are errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn

import tp_invariant as tpi
from tp_invariant.checkpoint import files as checkpoint_files
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.testing import RankError, assert_bitwise_equal, digest

VOCABULARY, HIDDEN, FFN = 45, 16, 48  # 45 ids: padded at every degree


class Model(nn.Module):
    """Every kind of parameter: padded vocabulary, gated, sharded by rows, whole, tied, and buffers."""

    def __init__(self, tp_group, seed=0, ffn=FFN, pad=8):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = tpi.VocabParallelEmbedding(VOCABULARY, HIDDEN, pad_vocab_to_multiple_of=pad, tp_group=tp_group)
        self.fc1 = tpi.LayerNormLinear(HIDDEN, 2 * ffn, parallel_mode="column", partition_stride=2, tp_group=tp_group)
        self.fc2 = tpi.Linear(ffn, HIDDEN, parallel_mode="row", tp_group=tp_group)
        self.register_buffer("seen", torch.tensor(0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = tpi.Linear(HIDDEN, HIDDEN, parallel_mode="column", gather_output=True, tp_group=tp_group)
        self.second = tpi.Linear(HIDDEN, HIDDEN, parallel_mode="column", gather_output=True, tp_group=tp_group)
        self.second.weight = self.first.weight  # tied

    def forward(self, ids):
        x = self.embedding(ids)
        gate, up = self.fc1(x).chunk(2, dim=-1)
        self.seen += 1
        return self.second(self.first(self.fc2(gate * up) * self.scale))


def optimizer_of(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    decay, rest = [], []
    for parameter in model.parameters():
        (decay if parameter.dim() > 1 else rest).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        ids = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def everything(model, optimizer):
    return tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


def unsharded():
    """The state of a model without any sharding."""
    return dict(Model(None, pad=1).state_dict())


pytestmark = pytest.mark.usefixtures("mode_on")


# --- on ranks -------------------------------------------------------------------------------------------------------


def save_trained(tp_group, path, kind="adamw", steps=2):
    model = Model(tp_group)
    optimizer = optimizer_of(kind, model)
    train(model, optimizer, steps)
    rng = torch.full((3,), float(resolve_group(tp_group).rank))
    tpi.checkpoint.save(path, model, optimizer, extra={"step": steps, "rng": rng, "pair": (1, [None, 2.5])})
    return everything(model, optimizer)


def load_and_train(tp_group, path, kind="adamw", more=1):
    model = Model(tp_group, seed=1)
    optimizer = optimizer_of(kind, model)
    extra = tpi.checkpoint.load(path, model, optimizer)
    loaded = everything(model, optimizer)
    train(model, optimizer, more, first=2)
    return loaded, extra, everything(model, optimizer)


def full_of_untrained(tp_group, **options):
    return tpi.full_state_dict(Model(tp_group), **options)


def through_full_dicts(tp_group, state, optimizer_state):
    model = Model(tp_group, seed=1)
    optimizer = optimizer_of("adamw", model)
    keys = tpi.load_full_state_dict(model, state)
    tpi.load_full_optimizer_state_dict(model, optimizer, optimizer_state)
    return tuple(keys), everything(model, optimizer)


def load_full(tp_group, state, strict):
    model = Model(tp_group, seed=1)
    return tuple(tpi.load_full_state_dict(model, state, strict)), tpi.full_state_dict(model)


def load_other(tp_group, path):
    tpi.checkpoint.load(path, Model(tp_group, ffn=2 * FFN).double())


def save_failing_on_rank_1(tp_group, path):
    model = Model(tp_group, seed=2)
    if resolve_group(tp_group).rank == 1:

        def fail(*args, **kwargs):
            raise OSError("No space left on device")

        import safetensors.torch

        real, safetensors.torch.save_file = safetensors.torch.save_file, fail
        try:
            tpi.checkpoint.save(path, model)
        finally:
            safetensors.torch.save_file = real
    else:
        tpi.checkpoint.save(path, model)


def save_with(tp_group, path, extra_of_rank):
    rank = resolve_group(tp_group).rank
    tpi.checkpoint.save(path, Model(tp_group), extra={"value": extra_of_rank[rank]})


def save_replicas(tp_group, path):
    """Data parallelism: every rank of the group has the same model."""
    tpi.checkpoint.save(path, Model(None), group=tp_group)


# --- full state dicts -----------------------------------------------------------------------------------------------


def test_full_state_dict_is_the_unsharded_models(tmp_path):
    expected = unsharded()
    for world in (2, 4):
        for full in run_ranks(full_of_untrained, world):
            assert list(full) == list(expected)
            assert_bitwise_equal(full, expected)
            save_file(full, tmp_path / "model.safetensors")  # refuses tensors that share memory
    assert expected["embedding.weight"].shape == (VOCABULARY, HIDDEN)
    assert {"seen", "first.weight", "second.weight"} <= expected.keys()


class Counter(nn.Identity):
    """A module with state that is no tensor of the model."""

    seen, total = 0, torch.zeros(())

    def get_extra_state(self):
        return {"seen": self.seen, "total": self.total}

    def set_extra_state(self, state):
        self.seen, self.total = state["seen"], state["total"]


def with_counter(tp_group, path, other=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Identity() if other else Counter(), nn.Linear(32, 16))
    names = sorted(model.state_dict())
    tpi.parallelize(model, tp_group, {"0": "colwise", "2": "rowwise"})
    if other:
        return said(lambda: tpi.checkpoint.load(path, model)), said(
            lambda: tpi.load_full_state_dict(model, {**tpi.full_state_dict(model), "1._extra_state": 1})
        )
    model[1].seen, model[1].total = 3, torch.tensor(0.5)
    full = tpi.full_state_dict(model)
    assert list(full) == list(dict.fromkeys([*full])) and sorted(full) == names and full["1._extra_state"]["seen"] == 3
    tpi.checkpoint.save(path, model)
    for load in (lambda: tpi.checkpoint.load(path, model), lambda: tpi.load_full_state_dict(model, full)):
        model[1].seen, model[1].total = 0, torch.zeros(())
        load()
        assert model[1].seen == 3 and float(model[1].total) == 0.5
    del full["1._extra_state"]
    return said(lambda: tpi.load_full_state_dict(model, full))


def said(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_extra_state(tmp_path):
    for text in run_ranks(with_counter, 2, str(tmp_path)):
        assert "missing in the state dict: 1._extra_state" in text
    assert "missing in the state dict: 1._extra_state" in with_counter(None, tmp_path / "of one rank")
    for by_checkpoint, by_dict in run_ranks(with_counter, 2, str(tmp_path), True):
        assert "unexpected in the checkpoint" in by_checkpoint and "1._extra_state" in by_checkpoint
        assert "unexpected in the state dict: 1._extra_state" in by_dict


def rank0_only(tp_group):
    return full_of_untrained(tp_group, rank0_only=True, cpu_offload=True)


def test_rank0_only():
    first, *others = run_ranks(rank0_only, 4)
    assert_bitwise_equal(first, unsharded())
    assert others == [{}, {}, {}]


def test_full_dicts_go_from_any_degree_to_any(tmp_path):
    (state, optimizer_state), *_ = run_ranks(save_trained, 2, str(tmp_path / "c"))
    assert optimizer_state["state"]["fc1.weight"]["exp_avg"].shape == (2 * FFN, HIDDEN)
    assert optimizer_state["param_groups"][1]["weight_decay"] == 0.0
    for world in (1, 4):
        for keys, loaded in run_ranks(through_full_dicts, world, state, optimizer_state):
            assert keys == ([], [])
            assert_bitwise_equal(loaded, (state, optimizer_state))


def test_state_of_an_unsharded_torch_model_loads():
    """Names and shapes are torch's: an optimizer of the unsharded model can load the full state."""
    layer = nn.Linear(HIDDEN, HIDDEN)
    model = tpi.Linear.from_linear(layer, parallel_mode="column", tp_group=None)
    with torch.no_grad():
        layer.weight.mul_(2)
    tpi.load_full_state_dict(model, layer.state_dict())
    assert_bitwise_equal(dict(model.state_dict()), dict(layer.state_dict()))


def test_load_full_state_dict_names_every_problem_on_every_rank():
    state = unsharded()
    broken = {name: tensor for name, tensor in state.items() if name != "scale"}
    broken |= {"fc2.weight": state["fc2.weight"].half(), "fc2.bias": torch.zeros(3), "other": torch.zeros(1)}
    with pytest.raises(RankError) as raised:
        run_ranks(load_full, 2, broken, True)
    assert set(raised.value.errors) == {0, 1}
    for error in raised.value.errors.values():
        assert isinstance(error, ValueError)
        for part in (
            "missing in the state dict: scale",
            "unexpected in the state dict: other",
            "fc2.weight is torch.float16 (16, 48) in the state dict and torch.float32 (16, 48) in the model",
            "fc2.bias is torch.float32 (3,) in the state dict and torch.float32 (16,) in the model",
        ):
            assert part in str(error)


def load_shards(tp_group):
    layer = tpi.Linear(HIDDEN, FFN, parallel_mode="column", tp_group=tp_group)
    tpi.load_full_state_dict(layer, layer.state_dict())


def test_shards_in_place_of_whole_tensors_are_named():
    """At TP=1 the same call loads, since the shards are the whole tensors."""
    run_ranks(load_shards, 1)
    with pytest.raises(RankError) as raised:
        run_ranks(load_shards, 2)
    for rank in (0, 1):
        hint = rf"It looks like the shards of rank {rank} of 2, .*Give the whole tensors of tp_invariant.full_state"
        assert re.search(hint, str(raised.value.errors[rank]))


def test_without_strict_the_matching_keys_are_loaded():
    state = unsharded()
    del state["scale"]
    state["other"] = torch.zeros(1)
    for keys, full in run_ranks(load_full, 2, state, False):
        assert keys == (["scale"], ["other"])
        assert_bitwise_equal(full["fc1.weight"], state["fc1.weight"])


@pytest.mark.parametrize("absent", ["first.weight", "second.weight"])
def test_tied_weights_may_be_given_once(absent):
    state = unsharded()
    del state[absent]
    for strict in (True, False):
        for keys, full in run_ranks(load_full, 2, state, strict):
            assert keys == ([], [])
            assert_bitwise_equal(full, unsharded())
    del state["first.weight" if absent == "second.weight" else "second.weight"]
    with pytest.raises(ValueError, match=r"missing in the state dict: first\.weight, second\.weight"):
        tpi.load_full_state_dict(Model(None), state)


@pytest.mark.parametrize("strict", [True, False])
def test_two_values_for_tied_weights_are_refused(strict):
    state, model = unsharded(), Model(None, seed=1)
    state["second.weight"] = state["first.weight"].clone()
    tpi.load_full_state_dict(model, state, strict)
    state["second.weight"].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    before = digest(dict(model.state_dict()))
    with pytest.raises(
        ValueError, match=r"second\.weight and first\.weight are one parameter in the model and two in the"
    ):
        tpi.load_full_state_dict(model, {**state, "scale": torch.tensor(9.0)}, strict)
    assert digest(dict(model.state_dict())) == before


def test_meta_models_are_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight is on the meta device: call model.to_empty\(device=...\) first"):
        tpi.load_full_state_dict(model, nn.Linear(2, 2).state_dict())


def test_state_of_other_shapes_is_refused_by_name(tmp_path):
    model = Model(None)
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    message = r"optimizer's state 'row_var' of embedding.weight has shape .* so Adafactor is not supported"
    with pytest.raises(ValueError, match=message):
        tpi.full_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=message):
        tpi.checkpoint.save(tmp_path / "c", model, optimizer)
    assert not (tmp_path / "c").exists()


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
    with pytest.raises(ValueError, match=r"param_groups\[0\] holds 2 tensors that are not parameters of the model"):
        tpi.full_optimizer_state_dict(Model(None), optimizer)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_any_degree_reads_what_any_wrote(tmp_path, kind):
    straight = None
    for wrote in (1, 2, 4):
        path = str(tmp_path / f"from{wrote}")
        saved = run_ranks(save_trained, wrote, path, kind)
        for reads in {1, 2, 4} - {wrote}:
            for loaded, extra, after in run_ranks(load_and_train, reads, path, kind):
                assert_bitwise_equal(loaded, saved[0], f"TP={wrote} to TP={reads}")
                assert extra["step"] == 2 and extra["pair"] == (1, [None, 2.5])
                assert_bitwise_equal(extra["rng"], torch.zeros(3), "rank 0's extra")
                straight = straight or after
                assert_bitwise_equal(after, straight, f"a step after TP={wrote} to TP={reads}")
    assert_bitwise_equal(run_ranks(save_trained, 1, str(tmp_path / "3"), kind, 3)[0], straight)


def test_optimizer_state_keeps_a_dtype_that_is_not_its_parameters(tmp_path):
    """torch's Optimizer.load_state_dict would round it to bfloat16."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.randn(parameter.shape), "note": None}
    before = tpi.full_optimizer_state_dict(model, optimizer)
    tpi.checkpoint.save(tmp_path, model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    tpi.checkpoint.load(tmp_path, model, other)
    assert_bitwise_equal(tpi.full_optimizer_state_dict(model, other), before)
    assert before["state"]["weight"]["momentum_buffer"].dtype == torch.float32
    third = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    tpi.load_full_optimizer_state_dict(model, third, before)
    assert_bitwise_equal(tpi.full_optimizer_state_dict(model, third), before)
    assert third.param_groups[0]["lr"] == 0.1


def test_full_optimizer_state_of_another_model_is_refused():
    small, large = nn.Linear(4, 4), nn.Linear(4, 8)
    states = []
    for model in (small, large):
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        states.append(tpi.full_optimizer_state_dict(model, optimizer))
    with pytest.raises(
        ValueError, match=r"'momentum_buffer' of weight has shape \(8, 4\) where the parameter has \(4, 4\)"
    ):
        tpi.load_full_optimizer_state_dict(small, torch.optim.SGD(small.parameters(), momentum=0.9), states[1])
    states[0]["state"]["other"] = {}
    with pytest.raises(ValueError, match="state of parameters that are in none of its groups: other"):
        tpi.load_full_optimizer_state_dict(small, torch.optim.SGD(small.parameters()), states[0])


def test_without_the_optimizers_state_training_continues_differently(tmp_path):
    """The control of the test above: it would notice state that was not loaded."""
    path = tmp_path / "c"
    save_trained(None, path)
    _, _, right = load_and_train(None, path)
    model = Model(None, seed=1)
    optimizer = optimizer_of("adamw", model)
    tpi.checkpoint.load(path, model)
    train(model, optimizer, 1, first=2)
    assert digest(tpi.full_state_dict(model)) != digest(right[0])


def test_replicas_are_written_once_and_nothing_is_pickled(tmp_path):
    path = tmp_path / "c"
    run_ranks(save_trained, 4, str(path))
    names = sorted(os.listdir(path))
    assert names[-1] == "index.json" and len(names) == 5
    assert all(re.fullmatch(r"[0-9a-f]{16}-0000[0-3]-00000\.safetensors", name) for name in names[:-1])
    size = sum((path / name).stat().st_size for name in names[:-1])
    alone = tmp_path / "alone"
    run_ranks(save_trained, 1, str(alone))
    data = next(alone.glob("*.safetensors")).stat().st_size
    assert size < data + 4 * 4000  # headers
    index = json.loads((path / "index.json").read_text())["tensors"]
    assert len(index["model.scale"]["boxes"]) == 1
    assert len(index["model.fc1.weight"]["boxes"]) == 8  # two pieces on each rank
    assert index["model.second.weight"] == index["model.first.weight"]  # tied


def test_replicas_under_data_parallelism_share_the_work(tmp_path):
    run_ranks(save_replicas, 4, str(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())["tensors"]
    assert all(len(tensor["boxes"]) == 1 for tensor in index.values())
    assert len({tensor["boxes"][0]["file"] for tensor in index.values()}) == 4
    model = Model(None, seed=1)
    tpi.checkpoint.load(tmp_path, model)
    assert_bitwise_equal(dict(model.state_dict()), dict(Model(None).state_dict()))


def test_a_new_save_replaces_the_old_and_cleans_up(tmp_path):
    for steps in (1, 2):
        run_ranks(save_trained, 2, str(tmp_path), "adamw", steps)
    assert len(os.listdir(tmp_path)) == 3
    model = Model(None)
    assert tpi.checkpoint.load(tmp_path, model)["step"] == 2


def test_big_checkpoints_go_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_FILE_BYTES", 4000)
    saved = save_trained(None, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded, _, _ = load_and_train(None, tmp_path)
    assert_bitwise_equal(loaded, saved)


def test_load_names_every_mismatch_on_every_rank(tmp_path):
    save_trained(None, tmp_path)
    before = Path(tmp_path / "index.json").read_bytes()
    with pytest.raises(RankError) as raised:
        run_ranks(load_other, 2, str(tmp_path))
    assert set(raised.value.errors) == {0, 1}
    for error in raised.value.errors.values():
        assert isinstance(error, ValueError)
        assert f"fc2.weight is torch.float32 (16, 48) in the checkpoint {tmp_path} and torch.float64 (16, 96)" in str(
            error
        )
    assert Path(tmp_path / "index.json").read_bytes() == before


def test_tied_and_untied_models(tmp_path):
    """A tied model's checkpoint loads into an untied model; the reverse gives two values for one parameter."""
    untied = Model(None, seed=1)
    untied.second.weight = nn.Parameter(untied.second.weight.clone())
    tied = Model(None)
    tpi.checkpoint.save(tmp_path, tied)
    tpi.checkpoint.load(tmp_path, untied)
    assert_bitwise_equal(dict(untied.state_dict()), dict(tied.state_dict()))
    tpi.checkpoint.save(tmp_path, untied)
    tpi.checkpoint.load(tmp_path, tied)  # two of the same bytes
    untied.second.weight.data.view(torch.int32).view(-1)[0] ^= 1
    tpi.checkpoint.save(tmp_path, untied)
    with pytest.raises(
        ValueError, match=r"second.weight and first.weight are one parameter in the model and two in the"
    ):
        tpi.checkpoint.load(tmp_path, tied)


@pytest.mark.parametrize("saved, own", [(torch.tensor(0.25), torch.tensor(0.5)), (torch.tensor(0.25), 0.5)])
def test_a_learning_rate_that_is_a_tensor(tmp_path, saved, own):
    """As captured and compiled steps take it."""

    def adamw(model, lr):
        return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)

    model = Model(None)
    tpi.checkpoint.save(tmp_path, model, adamw(model, saved.clone()))
    loaded = adamw(model, own)
    tpi.checkpoint.load(tmp_path, model, loaded)
    assert_bitwise_equal(loaded.param_groups[0]["lr"], saved)
    with pytest.raises(ValueError, match=r"has lr=\{'__tensor__': .*\} against lr='0.5'"):
        loaded.param_groups[0]["lr"] = "0.5"
        tpi.checkpoint.load(tmp_path, model, loaded)


def test_a_checkpoint_without_optimizer(tmp_path):
    model = Model(None)
    tpi.checkpoint.save(tmp_path, model)
    assert tpi.checkpoint.load(tmp_path, model) == {}
    with pytest.raises(ValueError, match="holds no optimizer: load without one"):
        tpi.checkpoint.load(tmp_path, model, optimizer_of("adamw", model))


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_failed_write_is_an_error_on_all_ranks_and_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "c"
    saved = run_ranks(save_trained, 2, str(path))
    with pytest.raises(RankError) as raised:
        run_ranks(save_failing_on_rank_1, 2, str(path))
    assert set(raised.value.errors) == {0, 1}
    for error in raised.value.errors.values():
        assert isinstance(error, RuntimeError)
        assert "rank 1 of 2: OSError: No space left on device" in str(error)
    loaded, _, _ = load_and_train(None, path)
    assert_bitwise_equal(loaded, saved[0])
    run_ranks(save_trained, 2, str(path))
    assert len(os.listdir(path)) == 3  # what the failed save left is gone


def save_interrupted_on_rank_1(tp_group, path, kind):
    """The error that save raised on this rank."""
    if resolve_group(tp_group).rank == 1:

        def interrupt(*args, **kwargs):
            raise kind(3)

        import safetensors.torch

        real, safetensors.torch.save_file = safetensors.torch.save_file, interrupt
    try:
        tpi.checkpoint.save(path, Model(tp_group))
    except BaseException as error:
        return error
    finally:
        if resolve_group(tp_group).rank == 1:
            safetensors.torch.save_file = real


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_raised_on_the_rank_that_got_it(tmp_path, kind):
    other, interrupted = run_ranks(save_interrupted_on_rank_1, 2, str(tmp_path / "c"), kind)
    assert type(interrupted) is kind and interrupted.args == (3,)
    assert type(other) is RuntimeError and f"rank 1 of 2: {kind.__name__}: 3" in str(other)


KILLED = """
import os, sys
import torch, tp_invariant as tpi
def die(*args):
    os._exit(9)
model = torch.nn.Linear(3, 3)
tpi.checkpoint.save(sys.argv[1], model, extra={"step": 1})
os.replace = die
tpi.checkpoint.save(sys.argv[1], torch.nn.Linear(3, 3), extra={"step": 2})
"""


def test_a_process_killed_before_the_commit_keeps_the_old_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 9, done.stderr
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    model = nn.Linear(3, 3)
    assert tpi.checkpoint.load(tmp_path, model) == {"step": 1}
    tpi.checkpoint.save(tmp_path, model)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_unsupported_extras_are_an_error_on_every_rank(tmp_path):
    with pytest.raises(RankError) as raised:
        run_ranks(save_with, 2, str(tmp_path / "c"), [1, {2}])
    assert set(raised.value.errors) == {0, 1}
    assert "rank 1 of 2: TypeError: extra.value is a set: a checkpoint takes dicts" in str(raised.value.errors[0])
    for extra in ({"a": {1: 2}}, {"a": {"__tensor__": "x"}}, {"a": b"x"}):
        with pytest.raises(TypeError, match=r"extra\.a is a (dict|bytes)"):
            tpi.checkpoint.save(tmp_path / "c", nn.Linear(2, 2), extra=extra)


def test_a_missing_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(FileNotFoundError, match=r"absent is not a checkpoint: there is no index\.json in it"):
        tpi.checkpoint.load(tmp_path / "absent", model)
    (tmp_path / "part.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="holds a save that did not finish"):
        tpi.checkpoint.load(tmp_path, model)
