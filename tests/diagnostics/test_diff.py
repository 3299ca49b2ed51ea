"""Digest logs: the same at every degree, sensitive to one bit and to order; and the output of `tp-invariant diff`."""

import json
import math
import re

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tp_invariant as tpi
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.core.bits import slice_hashes
from tp_invariant.diagnostics.cli import main as cli
from tp_invariant.testing import RankError

HIDDEN, FFN = 128, 1024  # sums long enough to show their order


# --- the hash -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64], ids=str)
def test_slice_hashes_notice_one_bit_one_swap_and_one_sign(dtype):
    x = torch.arange(1, 61).view(5, 12).to(dtype)
    before = slice_hashes(x, 0)
    assert before.dtype == torch.int64 and before.shape == (5,)
    assert len(set(before.tolist())) == 5
    swapped = x.clone()
    swapped[2, [0, 1]] = x[2, [1, 0]]
    assert (slice_hashes(swapped, 0) != before).tolist() == [False, False, True, False, False]
    if dtype.is_floating_point:
        zeros = torch.zeros(3, 4, dtype=dtype)
        negative = zeros.clone()
        negative[1, 3] = -0.0
        assert (slice_hashes(zeros, 0) != slice_hashes(negative, 0)).tolist() == [False, True, False]


def test_slice_hashes_do_not_depend_on_slicing_strides_or_blocks(monkeypatch):
    numbers = torch.randn(7 * 9 * 6 + 1, generator=torch.Generator().manual_seed(0))
    for dim, x in enumerate((numbers[1:].view(7, 9, 6), numbers[:-1].view(7, 9, 6), numbers[:315].view(7, 9, 5))):
        whole = slice_hashes(x, dim)
        assert torch.equal(torch.cat([slice_hashes(part, dim) for part in x.split(2, dim)]), whole)
        assert torch.equal(slice_hashes(x.transpose(0, 2).contiguous().transpose(0, 2), dim), whole)
        monkeypatch.setattr("tp_invariant.core.bits._BLOCK", 50)
        assert torch.equal(slice_hashes(x, dim), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("values", [[1.5, -2.0, 0.0], [1.5, -2.0, 0.0, -0.0]])
def test_slice_hashes_are_splitmix64(values):
    """Against the formula in Python's integers, which neither wrap nor shift signs; pairs of floats make a word."""
    x = torch.tensor([values])
    words = x.view(torch.int64 if len(values) % 2 == 0 else torch.int32)[0].tolist()
    total = 0
    for place, word in enumerate(words, start=1):
        z = (word ^ (place * 0x9E3779B97F4A7C15)) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += z ^ z >> 31
    assert slice_hashes(x, 0).item() % 2**64 == total % 2**64


# --- logs -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, tp_group):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = tpi.VocabParallelEmbedding(45, HIDDEN, pad_vocab_to_multiple_of=8, tp_group=tp_group)
        self.fc1 = tpi.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", partition_stride=2, tp_group=tp_group)
        self.fc2 = tpi.Linear(FFN // 2, HIDDEN, parallel_mode="row", tp_group=tp_group)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        gate, up = self.fc1(self.embedding(ids)).chunk(2, dim=-1)
        return self.fc2(gate * up) * self.scale


def train(tp_group, path, steps=3, first=0, change=None):
    """Trains and logs; change: (step, parameter, rank) of a bit that is flipped unnoticed."""
    model = Model(tp_group)
    if isinstance(tp_group, DeviceMesh):
        tpi.replicate_(model, tp_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = resolve_group(tp_group).rank
    digests = []
    with tpi.DigestLog(path, model, tp_group=tp_group) as log:
        for step in range(first + steps):
            ids = torch.randint(45, (24,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(ids).square().mean()
            loss.backward()
            norm = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
            optimizer.step()
            if change is not None and change[0] == step and rank in change[2]:
                model.get_parameter(change[1]).data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
            if step >= first:
                digests.append(log.write(step, loss=loss, gradient_norm=norm))
    return digests


def write_unlike(tp_group, path):
    model = Model(tp_group)
    if resolve_group(tp_group).rank:
        model.fc2.weight.grad = torch.zeros_like(model.fc2.weight)
    tpi.DigestLog(path, model, tp_group=tp_group).write(0)


def train_over_a_mesh(tp_group, path):
    return train(DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",)), path)


def fully_sharded(tp_group, path):
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=DeviceMesh.from_group(tp_group, "cpu"))
    tpi.DigestLog(path, model, tp_group=None)


def test_parameters_that_are_dtensors(logs, tmp_path, mode_on):
    """The lines of plain shards; after fully_shard an error."""
    path = tmp_path / "mesh.log"
    run_ranks(train_over_a_mesh, 2, str(path))
    assert path.read_text() == logs["on2"].read_text()
    with pytest.raises(RankError, match=r"0.weight is placed as \(Shard\(dim=0\),\) .* \(fully_shard\)"):
        run_ranks(fully_sharded, 2, str(tmp_path / "other.log"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Runs of three steps at TP=1, 2 and 4, with the mode on and off: {name: path}."""
    folder = tmp_path_factory.mktemp("logs")
    paths = {f"{mode}{world}": folder / f"{mode}{world}.log" for mode in ("on", "off") for world in (1, 2, 4)}
    for name, path in paths.items():
        with tpi.set_tp_invariant_mode(name.startswith("on")):
            digests = run_ranks(train, int(name[-1]), str(path))
        assert all(theirs == digests[0] for theirs in digests)
    return paths


def diff(capsys, *paths):
    status = cli(["diff", *map(str, paths)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_degrees_agree_with_the_mode_on_and_differ_with_it_off(logs, capsys):
    for world in (2, 4):
        status, text = diff(capsys, logs["on1"], logs[f"on{world}"])
        assert status == 0
        assert "TP=1, mode on; 3 steps" in text and f"TP={world}, mode on; 3 steps" in text
        assert text.endswith("identical for 3 steps, 0 to 2\n")
        status, text = diff(capsys, logs["off1"], logs[f"off{world}"])
        assert status == 1
        assert "step 0 differs, the first of 3 in common after 0 identical ones" in text
        assert "tensors: " in text and "\nloss 0." in text


def test_lines_hold_the_values_of_their_step(logs):
    header, *lines = [json.loads(line) for line in logs["on4"].read_text().splitlines()]
    assert header["degree"] == 4 and header["mode"] is True and header["device"] == "cpu"
    assert header["parameters"]["embedding.weight"] == "float32 [45, 128]"
    assert header["parameters"]["fc1.weight"] == "float32 [1024, 128]"
    assert [line["step"] for line in lines] == [0, 1, 2]
    names = list(lines[0]["tensors"])
    assert names[:3] == ["loss", "gradient norm", "gradient scale"] and "parameter fc1.layer_norm_bias" in names
    assert lines[0]["tensors"]["gradient unused"] is None
    assert len(lines[0]["tensors"]["parameter scale"]) == 32
    assert lines[0]["tensors"]["parameter unused"] == lines[2]["tensors"]["parameter unused"]
    assert lines[0]["tensors"]["parameter fc1.weight"] != lines[2]["tensors"]["parameter fc1.weight"]
    assert lines[0]["loss"] > 0 and lines[0]["gradient_norm"] > 0


@pytest.mark.parametrize("name", ["fc1.weight", "fc2.weight", "embedding.weight", "fc2.bias"])
def test_one_bit_is_found_and_named(logs, capsys, tmp_path, name, mode_on):
    path = tmp_path / "changed.log"
    run_ranks(train, 2, str(path), 2, 0, (1, name, (0, 1)))
    status, text = diff(capsys, logs["on1"], path)
    assert status == 1
    assert "1 steps of " in text and "have no counterpart" in text
    assert "step 1 differs, the first of 2 in common after 1 identical ones" in text
    assert f"1 of 20 tensors: parameter {name}\n" in text


def test_replicas_that_differ_are_named_with_their_ranks(logs, capsys, tmp_path, mode_on):
    path = tmp_path / "parted.log"
    run_ranks(train, 4, str(path), 1, 0, (0, "fc2.bias", (2, 3)))
    status, text = diff(capsys, logs["on1"], path)
    assert status == 1
    assert f"step 0 of {path}: ranks 2, 3 differ from rank 0 in parameter fc2.bias" in text


def test_a_resumed_run_appends_and_removes_an_unfinished_line(logs, capsys, tmp_path, mode_on):
    path = tmp_path / "resumed.log"
    run_ranks(train, 2, str(path), 2)
    with path.open("a") as file:
        file.write('{"step": 2, "loss"')
    status, text = diff(capsys, logs["on1"], path)
    assert status == 0 and "identical for 2 steps, 0 to 1" in text
    run_ranks(train, 4, str(path), 2, 1)  # step 1 once more, and step 2
    status, text = diff(capsys, logs["on1"], path)
    assert status == 0
    assert "TP=2, mode on; then TP=4, mode on; 3 steps" in text
    assert "identical for 3 steps, 0 to 2" in text


def test_ranks_that_log_other_tensors_get_an_error(tmp_path):
    with pytest.raises(RankError) as raised:
        run_ranks(write_unlike, 2, str(tmp_path / "x.log"))
    assert set(raised.value.errors) == {0, 1}
    assert "what there is to log is '9 tensors" in str(raised.value.errors[0])


# --- what diff refuses ----------------------------------------------------------------------------------------------


def plain_log(path, model, steps):
    with tpi.DigestLog(path, model, tp_group=None) as log:
        for step in steps:
            log.write(step, loss=1.0)
    return path


def damaged(path, line, **fields):
    """A log of two steps in which one line has other fields."""
    lines = plain_log(path, nn.Linear(2, 2), [0, 1]).read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **fields})
    path.write_text("\n".join([*lines, ""]))


@pytest.mark.parametrize(
    ("losses", "noted"), [((math.nan, math.nan), True), ((math.nan, 1.0), False), ((1.0, 2.0), False)]
)
def test_runs_that_had_diverged_are_called_so(tmp_path, capsys, losses, noted):
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for path, loss in zip(paths, losses, strict=True):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        with tpi.DigestLog(path, model, tp_group=None) as log:
            log.write(0, loss=1.0)
            model.bias.data.view(torch.int32)[:] = 0x7FC00000 + (path == paths[1])  # NaNs of other payloads
            log.write(1, loss=loss)
    status, text = diff(capsys, *paths)
    assert status == 1 and "step 1 differs" in text
    assert text.endswith(
        f"loss {losses[0]} and {losses[1]}\n" + noted * "both losses are NaN: the runs had diverged before\n"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.write_text(""), "holds no steps: is it a digest log?"),
        (lambda path: path.write_text("loss 3.4\n"), "line 1 of .* is not a line of a digest log"),
        (lambda path: path.write_text('{"format": "other"}\n'), "line 1 of .*its format is 'other'"),
        (lambda path: path.write_text('{"step": 1, "tensors": {}}\n'), "line 1 of .*there is no header before it"),
        (lambda path: damaged(path, 0, format="x" * 10**6), "line 1 of .*its format is 'xxxxxxxxxxxx\\.\\.\\.x+', not"),
        (
            lambda path: plain_log(path, nn.Linear(2, 3), [0]),
            r"different models: weight is float32 \[3, 2\] and .*\[2, 2\]",
        ),
        (lambda path: plain_log(path, nn.Linear(2, 2), [7]), "no step in common"),
        (
            lambda path: (plain_log(path, nn.Linear(2, 2), [0]), plain_log(path, nn.Linear(2, 3), [1])),
            "line 3 of .*changed",
        ),
    ],
)
def test_logs_that_cannot_be_compared(tmp_path, capsys, make, message):
    good = plain_log(tmp_path / "good.log", nn.Linear(2, 2), [0, 1])
    make(tmp_path / "bad.log")
    status, text = diff(capsys, tmp_path / "bad.log", good)
    assert status == 2
    assert re.search(message, text) and len(text) < 1000, text
