"""The example of LoRA: one digest at every degree, and adapters that plain PEFT loads."""

import pytest
import torch

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
    tpi.testing.run_ranks(_nothing, 4, device="cpu")
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


def _nothing(tp_group):
    """Does nothing; calling it starts the pool at its full size."""


def test_alone(capsys):
    assert main([*SMALL, "1"]) == 0
    step, last = capsys.readouterr().out.splitlines()
    assert step.startswith("step     0  loss 5.") and last.startswith("TP=1: adapters ")
