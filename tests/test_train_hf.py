"""The Hugging Face training example: stopped and resumed at other degrees, its run is the same to the bit."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gpus import gpu
from ranks import run_ranks
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import tp_invariant as tpi
from tp_invariant.diagnostics.diff import compare, read_log
from tp_invariant.examples.train_hf import (
    PRESETS,
    Batches,
    build_model,
    build_optimizer,
    main,
    make_parser,
    run,
    train_fully_sharded,
)

SCRIPT = Path(__file__).parents[1] / "examples" / "train_hf.py"
SMALL = ["--device", "cpu", "--batch", "1", "--sequence-length", "32"]


def train(tp_group, arguments):
    """One rank's part of a run."""
    run(tp_group, make_parser().parse_args([*SMALL, *arguments]), torch.device("cpu"))


def resumed_and_straight(folder, mode, steps, *extra):
    """The logs of `steps` steps at TP=2, then TP=4, then TP=1, each from the checkpoint before; and of TP=1 alone."""
    resumed, straight, checkpoint = (str(folder / name) for name in ("resumed.log", "straight.log", "checkpoint"))
    with tpi.set_tp_invariant_mode(mode):
        common = ["--steps", str(steps), "--save", checkpoint, "--digest-log", resumed, *extra]
        run_ranks(train, 2, common)
        run_ranks(train, 4, [*common, "--resume", checkpoint])
        run_ranks(train, 1, [*common, "--resume", checkpoint])
        run_ranks(train, 1, ["--steps", str(3 * steps), "--digest-log", straight, *extra])
    return read_log(resumed), read_log(straight)


def test_steps_at_three_degrees_equal_those_of_one_run(tmp_path):
    resumed, straight = resumed_and_straight(tmp_path, True, 5)
    text, same = compare(resumed, straight)
    assert same, text
    assert text.endswith("identical for 15 steps, 0 to 14")
    assert "TP=2, mode on; then TP=4, mode on; then TP=1, mode on; 15 steps" in text
    losses = [step["loss"] for _, step in sorted(straight.steps.items())]
    assert losses[0] > 5.0 and sum(losses[-5:]) / 5 < losses[0] - 0.5, "it trains"
    for log in (resumed, straight):
        names = log.steps[14]["tensors"]
        assert all(digest is not None for digest in names.values())
        assert sum(name.startswith("gradient model.layers.") for name in names) == 2 * 11


def hugging_faces_own(preset="qwen3-tiny"):
    """transformers' model, not parallelized."""
    kind, sizes = PRESETS[preset]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)


def test_the_loss_is_that_of_hugging_faces_own_model(tmp_path):
    run_ranks(train, 2, ["--steps", "1", "--digest-log", str(tmp_path / "a.log")])
    model = hugging_faces_own().double()
    tokens, targets = Batches(make_parser().parse_args(SMALL), torch.device("cpu")).at(0)
    loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    assert abs(read_log(tmp_path / "a.log").steps[0]["loss"] - loss.item()) < 1e-6 * loss.item()


def full_state(tp_group, arguments):
    return tpi.full_state_dict(build_model(make_parser().parse_args(arguments), tp_group, torch.device("cpu")))


@pytest.mark.parametrize("preset", ["qwen3-tiny", "llama-tiny"])
def test_hugging_face_loads_the_full_state(tmp_path, preset):
    model = hugging_faces_own(preset)
    full = run_ranks(full_state, 4, ["--preset", preset])[0]
    tpi.testing.assert_bitwise_equal(full, dict(model.state_dict()))
    save_file(full, tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tpi.testing.assert_bitwise_equal(dict(loaded.state_dict()), full)


def test_with_the_mode_off_they_differ(tmp_path):
    """The control: one step at TP=2 and at TP=1."""
    logs = [str(tmp_path / name) for name in ("two.log", "one.log")]
    with tpi.set_tp_invariant_mode(False):
        for degree, log in zip((2, 1), logs, strict=True):
            run_ranks(train, degree, ["--steps", "1", "--digest-log", log])
    text, same = compare(*map(read_log, logs))
    assert not same
    assert "step 0 differs" in text


def test_llama_with_sequence_parallelism(tmp_path):
    text, same = compare(*resumed_and_straight(tmp_path, True, 2, "--preset", "llama-tiny", "--sequence-parallel"))
    assert same, text


def fully_sharded(world_group, tp, dp, arguments):
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    options = make_parser().parse_args([*SMALL, *arguments])
    return train_fully_sharded(mesh, options, torch.device("cpu"))


@pytest.mark.more
def test_data_parallel_ranks_by_fully_shard():
    """One digest at 1 x 4, 2 x 2 and 4 x 1; without the mode several."""
    arguments = ["--steps", "2", "--micro-batches", "4"]
    with tpi.set_tp_invariant_mode(True):
        digests = {d for tp in (4, 2, 1) for d in run_ranks(fully_sharded, 4, tp, 4 // tp, arguments)}
        assert len(digests) == 1
    with tpi.set_tp_invariant_mode(False):
        assert len({run_ranks(fully_sharded, 4, tp, 4 // tp, ["--steps", "1"])[0] for tp in (4, 1)}) == 2


GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")])


def bytes_that_follow_the_cut(make, device, dtype, size=300_007):
    """How many bytes of parameter and state differ after four steps between a parameter in pieces and in one piece."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = (tpi.testing.wide_randn(size, generator=generator, spread=4).to(device, dtype) for _ in range(5))

    def steps(cuts):
        pieces = [torch.nn.Parameter(start[a:b].clone()) for a, b in pairwise([0, *cuts, size])]
        optimizer = make(torch.nn.ParameterList(pieces), make_parser().parse_args(SMALL), torch.device(device))
        for grad in grads:
            for piece, part in zip(pieces, grad.split([len(piece) for piece in pieces]), strict=True):
                piece.grad = part.clone()
            optimizer.step()
        state = [[piece.detach(), *(optimizer.state[piece][k] for k in ("exp_avg", "exp_avg_sq"))] for piece in pieces]
        return [torch.cat(parts).view(torch.uint8) for parts in zip(*state, strict=True)]

    whole = steps([])
    pieces = [steps(cuts) for cuts in ([1], [7, 65_539], [150_004], [100_001, 100_008, 299_999])]
    return sum(int((x != y).sum()) for cut in pieces for x, y in zip(cut, whole, strict=True))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_optimizer_does_not_depend_on_where_a_parameter_is_cut(device, dtype):
    assert bytes_that_follow_the_cut(build_optimizer, device, dtype) == 0


def test_a_fused_optimizer_on_a_cpu_depends_on_it():
    """The control, and the reason why the example uses another optimizer there."""

    def fused(model, options, device):
        return torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)

    assert bytes_that_follow_the_cut(fused, "cpu", torch.float32) > 0


@gpu
def test_layers_as_graphs_take_the_same_steps(tmp_path):
    logs = {}
    with tpi.set_tp_invariant_mode(True):
        for name, more in (("eager", []), ("graphed", ["--graph-layers"])):
            path = str(tmp_path / name)
            options = make_parser().parse_args([*SMALL, "--steps", "4", "--digest-log", path, *more])
            run(None, options, torch.device("cuda", torch.cuda.current_device()))
            logs[name] = read_log(path)
    text, same = compare(logs["eager"], logs["graphed"])
    assert same, text


def test_what_does_not_go_with_data_parallel_ranks(capsys):
    for arguments, text in (
        (["--dp", "2", "--save", "x"], "--dp takes none of --save, --resume, --graph-layers and --digest-log"),
        (["--dp", "2"], "--dp needs ranks: torchrun"),
    ):
        with pytest.raises(SystemExit):
            main([*SMALL, *arguments])
        assert text in capsys.readouterr().err


def test_torchrun(tmp_path):
    """The commands at the top of the example; short, since each starts interpreters."""
    log = tmp_path / "a.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "TP_INVARIANT_MODE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [*SMALL, "--steps", "1", "--digest-log", str(log)]
    # a session of its own, so that a run that hangs can be ended with its ranks
    process = subprocess.Popen(
        [*command, *arguments], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0
    assert "qwen3-tiny, float32, TP=2 on cpu, TP-invariant mode on" in printed
    assert "peak memory of each rank" in printed and "median step" in printed
    header, line = map(json.loads, log.read_text().splitlines())
    assert header["degree"] == 2 and line["step"] == 0
