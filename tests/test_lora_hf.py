"""The example of LoRA: one digest at every degree, and adapters that plain PEFT loads."""

import pytest
import torch
from meshes import init_device_mesh

import tp_invariant as tpi

pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")

from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from tp_invariant.examples.lora_hf import main, make_parser, train
from tp_invariant.examples.train_hf import PRESETS, Batches

SMALL = ["--device", "cpu", "--batch", "1", "--sequence-length", "32", "--steps"]


def run(tp_group, *arguments):
    return train(tp_group, make_parser().parse_args([*SMALL, *arguments]), torch.device("cpu"))


def on_ranks(degree, *arguments, mode=True):
    with tpi.set_tp_invariant_mode(mode):
        results = tpi.testing.run_ranks(run, degree, *arguments, device="cpu")
    assert len({digest for _, digest in results}) == 1
    return results[0]


def test_the_same_bits_at_every_degree(tmp_path):
    adapter = str(tmp_path / "adapter")
    losses, digest = on_ranks(2, "6", "--save", adapter)
    assert on_ranks(1, "6") == (losses, digest)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.05, "it trains"
    loaded = on_ranks(1, "2", "--load", adapter)
    assert on_ranks(4, "2", "--load", adapter, "--sequence-parallel") == loaded
    assert on_ranks(2, "1", mode=False) != on_ranks(1, "1", mode=False), "the control"
    # transformers' and PEFT's own
    kind, sizes = PRESETS["qwen3-tiny"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    tokens, targets = Batches(make_parser().parse_args([*SMALL, "1"]), torch.device("cpu")).at(0)
    logits = PeftModel.from_pretrained(model, adapter)(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert abs(loss - loaded[0][0]) < 1e-5


def run_over_a_mesh(world_group, dp, *arguments):
    mesh = init_device_mesh("cpu", (dp, world_group.size() // dp), mesh_dim_names=("dp", "tp"))
    options = make_parser().parse_args([*SMALL, *arguments])
    return train(mesh["tp"], options, torch.device("cpu"), mesh["dp"])


def test_data_parallel_ranks(tmp_path):
    """1 x 4, 2 x 2 and 4 x 1; and the adapters that 2 x 2 has saved."""
    results, folder = [], tmp_path / "adapter"
    with tpi.set_tp_invariant_mode(True):
        for dp in (1, 2, 4):
            save = ["--save", str(folder)] if dp == 2 else []
            results += tpi.testing.run_ranks(run_over_a_mesh, 4, dp, "1", *save, device="cpu")
    assert all(found == results[0] for found in results)
    assert len(results[0][0]) == 1 and (folder / "adapter_model.safetensors").exists()
    with tpi.set_tp_invariant_mode(False):
        few = "1", "--micro-batches", "2"
        off = [tpi.testing.run_ranks(run_over_a_mesh, 4, dp, *few, device="cpu")[0] for dp in (1, 2)]
    assert off[0] != off[1], "the control"


def test_dp_needs_ranks(capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "1", "--dp", "1"])
    assert "--dp 1 needs a number of ranks that it divides: torchrun" in capsys.readouterr().err


def test_alone(capsys):
    assert main([*SMALL, "1"]) == 0
    step, last = capsys.readouterr().out.splitlines()
    assert step.startswith("step     0  loss 5.") and last.startswith("TP=1: adapters ")
