"""A sample of the table of model types in docs/model_types.md, made again; the whole of it: model_types.py."""

import model_types
import pytest
import torch

import tp_invariant as tpi
from tp_invariant import testing

ROWS = model_types.rows(model_types.DOCUMENT.read_text())
# One of each: gated queries and linear attention, a norm used twice, a config whose fields differ by layer, gated norms
# with a mixture of experts (two), a config of several models, attention sinks, latent attention, a mask that the model
# extends, no plan.
SAMPLE = [
    "qwen3_5_text", "nanochat", "gemma4_text", "kimi_linear", "bailing_hybrid", "granite_swa", "minicpm3",
    "deepseek_v4", "gpt2",
]  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_row_of_the_table(model_type):
    variants = [(None, False), (True, True)] if "yes" in ROWS[model_type] else [(None, False)]
    for tied, sp in variants:
        found = model_types.examine(model_type, tied, sp)
        assert model_types._STATES[found["state"]] in ROWS[model_type], found
        if found["state"] != "works":
            assert model_types.row(model_type, {"plain": found}).split(" | ")[-1] == ROWS[model_type].split(" | ")[-1]


def test_nothing_in_the_table_is_a_defect():
    assert set(model_types.class_names()) <= ROWS.keys()
    assert not any("DEFECT" in row for row in ROWS.values())
    assert sum("yes |" in row for row in ROWS.values()) > 40


def test_what_is_wrong_is_named():
    """The rule itself: the stock model passes, a gradient that is half or missing does not."""
    exact, theirs = (model_types.stock("llama", None, dtype) for dtype in (torch.float64, torch.float32))
    name = "model.layers.1.self_attn.k_proj.weight"
    assert model_types.wrong(theirs, exact, theirs) == ""
    assert model_types.wrong({**theirs, name: theirs[name] * 1.01}, exact, theirs).startswith(f"{name}: relative error")
    assert model_types.wrong({**theirs, name: None}, exact, theirs) == f"{name}: one has a gradient and the other none"


def test_the_control():
    """With the mode off the bits depend on the degree, so that the table's comparison is one."""

    def off(degree):
        return testing.run_ranks(model_types.run_on_rank, degree, "nanochat", None, False, False, device="cpu")[0]

    with pytest.raises(AssertionError):
        tpi.testing.assert_bitwise_equal(off(2)["step"], off(1)["step"])
