"""Attention masks besides the causal one, as --reset-attention-mask makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_runs import batch, config_of, differing, full, model_of, on_degree, on_new_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")

EOD = 1


def sequences(reset: bool) -> tuple[torch.Tensor, ...]:
    """(ids, labels, positions, mask) as Megatron's GPTDataset makes them of sequences, the first of three documents."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    ids, labels, _ = batch(0)
    ids = ids.clamp(min=2)
    ids[0, [1, 4]] = EOD
    made = [_get_ltor_masks_and_position_ids(row, EOD, reset, reset, False, True) for row in ids]
    mask, _, positions = (torch.stack(parts) for parts in zip(*made, strict=True))
    return ids, labels, positions, mask


def padded() -> tuple[torch.Tensor, ...]:
    """Sequences without documents, of which the second has three tokens of padding that no token before sees."""
    ids, labels, positions, mask = sequences(False)
    mask = mask.clone()
    mask[1, :, :, 5:] |= ~torch.eye(8, dtype=torch.bool)[:, 5:]
    return ids, labels, positions, mask


CASES = {"documents": lambda: sequences(True), "padding": padded, "causal": lambda: sequences(False)}


def runs(rank: int, world: int, mode: bool, local: bool) -> dict[str, Any]:
    """Losses and gradients of every case, one after another in one model; positions are learned."""
    found: dict[str, Any] = {}
    with on_degree(world, mode, install=not local):
        model = model_of(config_of(world, sequence_parallel=not local), local=local, position="learned_absolute")
        for case, of_case in CASES.items():
            ids, labels, positions, mask = of_case()
            loss = model(ids, positions, mask, labels=labels)
            model.zero_grad()
            loss.mean().backward()
            found[f"{case} loss"] = loss.detach().clone()
            for name, p in model.named_parameters():
                name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                found[f"{case} {name}"] = full(p.grad, p).clone()
        if not local:
            without = model(ids, positions, attention_mask=None, labels=labels)
            assert torch.equal(without, found["causal loss"])
    return found


def with_and_without(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return runs(rank, world, True, False), runs(rank, world, False, False)


def test_masks_have_the_values_of_megatrons_layers_and_the_bytes_of_one_rank() -> None:
    one, off = on_new_ranks(with_and_without, 1)[0]
    theirs = on_new_ranks(runs, 1, False, True)[0]
    assert one.keys() == theirs.keys()
    for name, wanted in theirs.items():
        torch.testing.assert_close(one[name], wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)
    assert not torch.allclose(one["documents loss"][0], one["causal loss"][0])
    for two, two_off in on_new_ranks(with_and_without, 2):
        assert not differing(one, two)
        assert differing(off, two_off)


def refusals(rank: int, world: int) -> list[str]:
    texts = []
    with on_degree(world):
        ids, labels, positions, mask = sequences(True)
        model = model_of(config_of(world))
        model(ids, positions, mask, labels=labels)
        hidden = mask.clone()
        hidden[1, :, 3] = True
        for wrong in (~mask, torch.zeros(2, 1, 1, 8, dtype=torch.bool), hidden, torch.ones_like(mask)):
            with pytest.raises(ValueError) as refused:
                model(ids, positions, attention_mask=wrong, labels=labels)
            texts.append(str(refused.value))
    return texts


def test_masks_of_another_meaning_are_refused_by_name() -> None:
    texts = on_new_ranks(refusals, 1)[0]
    for text, what in zip(texts, ["does not hide later"] * 2 + ["hides every token from one"] * 2, strict=True):
        assert text.startswith("attention_mask (2, 1, ") and what in text
