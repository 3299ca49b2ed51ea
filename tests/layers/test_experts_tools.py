"""Mixtures of experts with other tools: each gives the bits of one rank, or an error with the reason."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import checkpoint
from tp_invariant.functional import experts
from tp_invariant.layers import adapters
from tp_invariant.layers import experts as experts_layer
from tp_invariant.testing import assert_bitwise_equal, full_grads, full_parameters

HIDDEN, INNER, EXPERTS = 16, 24, 4
ROUTING = tpi.Routing(2)


pytestmark = pytest.mark.usefixtures("mode_on")


def build(tp_group: Any, seed: int = 0, **options: Any) -> tpi.MixtureOfExperts:
    torch.manual_seed(seed)
    return tpi.MixtureOfExperts(EXPERTS, HIDDEN, INNER, ROUTING, bias=True, tp_group=tp_group, **options)


def tokens(step: int = 0) -> Tensor:
    return torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: int = 2, first: int = 0, call: Any = None) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    results: dict[str, Any] = {}
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = tokens(step).requires_grad_()
        y = (model if call is None else call)(x)
        y.square().mean().backward()
        results[f"step {step}"] = y.detach(), x.grad, full_grads(model)
        results[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return results | {"parameters": full_parameters(model)}


# --- torch.compile --------------------------------------------------------------------------------------------------


def compiled(tp_group):
    model = build(tp_group)
    torch._dynamo.reset()
    return train(model, call=torch.compile(model, backend="aot_eager"))


def test_compiled_it_has_the_eager_bits():
    want = train(build(None))
    assert_bitwise_equal(compiled(None), want)
    for got in run_ranks(compiled, 2):
        assert_bitwise_equal(got, want)


# --- a DeviceMesh ---------------------------------------------------------------------------------------------------


def over_a_mesh(tp_group):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = build(mesh_or_group(tp_group, "mesh"))
    results = train(model)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_bitwise_equal(found, tpi.full_state_dict(model))
    return results


def test_over_a_mesh_and_its_full_state_dict_by_torch():
    want = train(build(None))
    for got in run_ranks(over_a_mesh, 4):
        assert_bitwise_equal(got, want)


def sequence_parallel_step(tp_group, kind):
    """Of two tokens each on four ranks: the gradients of the router are those of all tokens."""
    model = build(mesh_or_group(tp_group, kind), sequence_parallel=True)
    group = model.experts.group
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0)).chunk(group.size)[group.rank]
    model(x.clone()).square().sum().backward()
    return full_grads(model), tpi.clip_grad_norm_(model.parameters(), 0.5), full_grads(model)


def test_clipped_gradients_under_sequence_parallelism():
    want = sequence_parallel_step(None, "group")
    for kind in ("group", "mesh"):
        for got in run_ranks(sequence_parallel_step, 4, kind):
            assert_bitwise_equal(got, want)


# --- checkpoints and logs -------------------------------------------------------------------------------------------


def save(tp_group, folder):
    model = build(tp_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(tokens()).square().mean().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    return tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


def load(tp_group, folder, by_expert):
    model = build(tp_group, seed=1, expert_parallel_group=tp_group if by_expert else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(folder, model, optimizer)
    return tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


def test_a_checkpoint_goes_to_another_degree_and_another_way_of_storing(tmp_path):
    wrote = run_ranks(save, 2, str(tmp_path / "a"))[0]
    for by_expert in (False, True):
        for read in run_ranks(load, 4, str(tmp_path / "a"), by_expert):
            assert_bitwise_equal(read, wrote)


# --- copies, other parameters, autocast, batch_invariant ------------------------------------------------------------


def copied(tp_group):
    model = build(tp_group)
    twin = copy.deepcopy(model)
    results = [train(twin)]
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    results.append(torch.func.functional_call(model, doubled, (tokens(),)).detach())
    with torch.no_grad():
        assert not torch.equal(results[1], model(tokens()))
        for parameter in model.parameters():
            parameter.mul_(2)
        assert torch.equal(results[1], model(tokens()))
    return results


def test_copies_and_functional_calls():
    want = copied(None)
    assert_bitwise_equal(want[0], train(build(None)))
    for got in run_ranks(copied, 2):
        assert_bitwise_equal(got, want)


def under_autocast(tp_group):
    model = build(tp_group)
    x = tokens().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return y.detach(), x.grad, full_grads(model)


def test_autocast():
    want = under_autocast(None)
    exact = build(None)(tokens())
    torch.testing.assert_close(want[0].float(), exact, rtol=0.1, atol=0.02)
    for got in run_ranks(under_autocast, 4):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize("mode", ("1", "0"))
def test_rows_of_a_batch_have_the_bits_of_any_other_batch(monkeypatch, mode):
    """In batch_invariant(), the mode on or off: with it off torch's products are routed."""
    monkeypatch.setenv("TP_INVARIANT_MODE", mode)
    model, x = build(None), tokens()
    with tpi.batch_invariant(), torch.no_grad():
        whole = model(x)
        for start, end in ((0, 1), (1, 3)):
            assert_bitwise_equal(model(x[start:end].clone()), whole[start:end].clone())


# --- what is refused ------------------------------------------------------------------------------------------------


def test_adapters_of_experts_are_refused():
    """PEFT's LoRA of a parameter wraps the module, with adapters of the shape of this rank's part."""
    wrapper = type("ParamWrapper", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
    with pytest.raises(ValueError, match="would take a Experts of tp_invariant for a whole layer"):
        adapters._refuse(wrapper, "base_layer", build(None).experts)
    with pytest.raises(ValueError, match="would take a Experts of tp_invariant for a whole layer"):
        wrapper.base_layer = build(None).experts


def captured(tp_group):
    model = build(tp_group)
    with mock.patch.object(experts_layer, "is_capturing", lambda: True), pytest.raises(ValueError) as caught:
        model.experts(tokens(), torch.zeros(3, 7, 2, dtype=torch.long), torch.ones(3, 7, 2))
    return str(caught.value)


def test_captured_over_several_ranks():
    for rank, text in enumerate(run_ranks(captured, 2)):
        assert f"Experts(4, 16, 24) on rank {rank} is captured in a CUDA graph over 2 ranks" in text


# --- functions between the products ---------------------------------------------------------------------------------

GATES: dict[str, experts_layer.Activation] = {
    "glu": lambda h: F.glu(torch.cat([h[:, ::2], h[:, 1::2]], 1)),
    "glu over columns": lambda h: F.glu(h.t(), 0).t(),
    "sigmoid": lambda h: torch.sigmoid(h[:, ::2]) * h[:, 1::2],
    "logsigmoid": lambda h: F.logsigmoid(h.unflatten(1, (2, -1))).unbind(1)[0],
    "ldexp": lambda h: torch.ldexp(h[:, ::2], h[:, 1::2]),
    "rsub": lambda h: torch.rsub(h[:, ::2], 1.7, alpha=0.3) * h[:, 1::2],
    "softplus": lambda h: torch.where(h > 0, F.softplus(h), h * 0.1)[:, ::2],
}


TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2e-2, atol=0.2)}


def gated(fn: experts_layer.Activation, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().clone().requires_grad_()
    y = fn(h)
    y.backward(torch.full_like(y, 0.3))
    assert h.grad is not None
    return y.detach(), h.grad


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_gate_has_the_bits_of_each_row_alone(dtype):
    h = (torch.randn(3001, 72, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    rows = [slice(0, 1), slice(0, 1501), slice(1400, 1600)]  # two threads of torch part in row 1500
    with_torch = []
    torch.set_num_threads(2)
    try:
        for name, fn in GATES.items():
            whole = gated(lambda h, fn=fn: experts.gate(h, fn), h)
            theirs = gated(fn, h)
            torch.testing.assert_close(whole, theirs, **TOLERANCE[dtype])
            for part in rows:
                got = gated(lambda h, fn=fn: experts.gate(h, fn), h[part])
                assert_bitwise_equal(got, tuple(t[part] for t in whole), name)
                stock = gated(fn, h[part])
                with_torch.append(all(torch.equal(a, b[part]) for a, b in zip(stock, theirs, strict=True)))
    finally:
        torch.set_num_threads(1)
    assert not all(with_torch) or dtype == torch.bfloat16


LEARNED = torch.ones(1, requires_grad=True)
REFUSED_GATES: dict[str, tuple[experts_layer.Activation, str]] = {
    "sum": (lambda h: h[:, ::2] * h.sum(0)[::2], "second row is not what it returns for that row alone"),
    "random": (
        lambda h: h[:, ::2] * torch.rand(h[:, ::2].shape),
        "second row is not what it returns for that row alone",
    ),
    "roll": (lambda h: h[:, ::2].roll(1, 0), "second row is not what it returns for that row alone"),
    "number of rows": (lambda h: h[:, ::2] / len(h), "second row is not what it returns for that row alone"),
    "parameter": (lambda h: h[:, ::2] * LEARNED, "takes a tensor that requires a gradient"),
}


def gate_refused(tp_group: Any, name: str) -> str:
    layer = tpi.Experts(EXPERTS, HIDDEN, INNER, gate_fn=REFUSED_GATES[name][0], tp_group=tp_group)
    with pytest.raises(ValueError) as caught:
        layer(tokens(), torch.zeros(3, 7, 1, dtype=torch.int64), torch.ones(3, 7, 1))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED_GATES)
def test_what_is_refused_between_the_products(name):
    """On every rank, those without a row among them."""
    for text in run_ranks(gate_refused, 2, name):
        assert re.search(REFUSED_GATES[name][1], text), text


def test_a_learned_activation_is_refused():
    layer = tpi.Experts(EXPERTS, HIDDEN, INNER, activation=nn.PReLU())
    arguments = tokens(), torch.zeros(3, 7, 1, dtype=torch.int64), torch.ones(3, 7, 1)
    with pytest.raises(ValueError, match="a tensor that requires a gradient"):
        layer(*arguments)
    layer.activation.requires_grad_(False)
    assert layer(*arguments).shape == (3, 7, HIDDEN)
