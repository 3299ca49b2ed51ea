"""What check_config and check_model refuse, and attention's windows and padding masks against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron_runs import config_of
from torch import nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")

FAULTS = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "context_parallel_size": 2, "num_moe_experts": 8,
    "multi_latent_attention": True, "mtp_num_layers": 1, "fp8": "hybrid", "fp4": "e2m1", "tp_comm_overlap": True,
    "batch_invariant_mode": True, "delay_wgrad_compute": True, "defer_embedding_wgrad_compute": True,
    "cpu_offloading": True, "fused_residual_rmsnorm": True, "qk_clip": True, "qk_l2_norm": True, "use_kitchen": True,
    "use_te_op_fuser": True, "inference_fuse_tp_communication": True, "gtp_weight_remat_size": 2,
    "normalization": "L2Norm", "softmax_type": "learnable",
}  # fmt: skip


def test_every_refused_field_of_a_configuration_is_named_at_once() -> None:
    from tp_invariant.integrations.megatron.checks import _FAULTS, check_config

    assert FAULTS.keys() == _FAULTS.keys()
    good = dict(num_query_groups=4, tensor_model_parallel_size=2)
    check_config(SimpleNamespace(**good))
    with pytest.raises(ValueError) as refused:
        check_config(SimpleNamespace(**FAULTS, **good))
    lines = str(refused.value).splitlines()[1:]
    assert [line.split(". ", 1)[1].split(":")[0] for line in lines] == [f"{n}={v!r}" for n, v in FAULTS.items()]


def test_modules_of_transformer_engine_are_refused_by_name() -> None:
    """The names of its classes and of Megatron's classes over them are all that a program without it can imitate."""
    from tp_invariant.integrations.megatron import check_model

    def named(module: str, name: str) -> nn.Module:
        part = type(name, (nn.Module,), {"__module__": module})()
        part.weight = nn.Parameter(torch.zeros(1))
        return part

    names = [
        ("megatron.core.extensions.transformer_engine", "TELayerNormColumnParallelLinear"),
        ("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
        ("transformer_engine.pytorch.module.rmsnorm", "RMSNorm"),
    ]
    with pytest.raises(ValueError) as refused:
        check_model(nn.ModuleList(named(*each) for each in names))
    for i, (module, name) in enumerate(names):
        assert f"{i} is a {module}.{name}" in str(refused.value)
    check_model(nn.ModuleList())


@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_windows_and_padding_masks(kind: str, window: tuple[int, int] | None) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from tp_invariant.integrations import megatron

    config = config_of(1, window_size=window)
    layer = megatron.CoreAttention(config, 1, AttnMaskType[kind], "self")
    q, k, v = torch.randn(3, 6, 2, 8, 4, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    if kind == "padding":
        hidden[1, ..., 4:] = True
    got = layer(q, k, v, hidden if kind == "padding" else None)
    before = torch.arange(6)[:, None] - torch.arange(6)
    if kind == "causal":
        hidden = hidden | (before < 0) | (before > (window or (6, 0))[0])
    scores = torch.einsum("sbhd,tbhd->bhst", q.double(), k.double()) / 2
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    wanted = torch.einsum("bhst,tbhd->sbhd", weights, v.double()).flatten(2)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
