"""The device that torch.device(..) or torch.set_default_device sets is the user's: nothing of ours is made there."""

from contextlib import nullcontext

import pytest
import torch
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.sampling.draws import Draws
from tp_invariant.testing import digest

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4)
SIZES |= dict(head_dim=8, num_hidden_layers=1, use_cache=False)
CONFIGS = {
    "dense": lambda: Qwen3Config(**SIZES),
    "mixture": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}


def trained(tp_group, kind, default, folder, mode=True):
    """Two steps, a checkpoint between them; then draws."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    ids, positions = torch.randint(64, (2, 8)), torch.tensor([3, 4])
    with tpi.set_tp_invariant_mode(mode), nullcontext() if default is None else torch.device(default):
        model = tpi.parallelize(model, tp_group, sequence_parallel=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        seen = []
        for step in range(2):
            loss = tpi.vocab_parallel_cross_entropy(model(ids).logits, ids, tp_group=None)
            loss.backward()
            seen += [loss.detach(), tpi.clip_grad_norm_(model.parameters(), 1.0)]
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tpi.checkpoint.save(folder, model, optimizer, group=tp_group)
                tpi.checkpoint.load(folder, model, optimizer, group=tp_group)
        seen += [Draws(1).draw(loss.detach().expand(2, 8), ["a", "b"], at) for at in ([3, 4], positions)]
        return digest([seen, tpi.full_state_dict(model)])


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_default_device_changes_nothing(kind, tmp_path):
    """On "meta" a tensor has no values: one that was made there would raise."""
    found = set()
    for ranks in (1, 2):
        for default in (None, "meta"):
            found |= set(run_ranks(trained, ranks, kind, default, str(tmp_path / f"{ranks}{default}")))
    assert len(found) == 1
    assert found.isdisjoint(run_ranks(trained, 2, kind, None, str(tmp_path / "off"), False)), "the control"
