"""Activations in a converted model: the user's own module stays, with torch's semantics; bits at every degree."""

from __future__ import annotations

import copy
import itertools

import hf_models
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.hugging_face import fused

PLAN = {"up": "colwise", "down": "rowwise"}


class Lower(nn.SiLU):
    """A forward of its own, of elementwise functions."""

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(1.7 * input) - 0.1


class OfRows(nn.GELU):
    """A forward of its own that takes its input's rows as they are: along the tokens, not the features."""

    def forward(self, hidden: Tensor, power: float = 1.0) -> Tensor:
        return super().forward(hidden - hidden[:, :1]) * torch.sigmoid(hidden[:, -1:]) ** power


def with_own_forward() -> nn.Module:
    module = nn.Tanh()
    module.forward = lambda x: F.silu(x) + x[:, :1]
    return module


ACTIVATIONS = {
    "silu": nn.SiLU(),
    "silu in place": nn.SiLU(inplace=True),
    "elu in place": nn.ELU(0.7, inplace=True),
    "mish in place": nn.Mish(inplace=True),
    "selu in place": nn.SELU(inplace=True),
    "relu in place": nn.ReLU(inplace=True),
    "hardswish in place": nn.Hardswish(inplace=True),
    "logsigmoid": nn.LogSigmoid(),
    "derived": Lower(),
    "derived, of rows": OfRows(),
    "own forward": with_own_forward(),
}


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(16, 40), act, nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def step(model: nn.Module, grad: bool) -> list[Tensor]:
    """The output, all gradients, and what the activation has made of its argument."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(grad):
        y = model(x)
        if grad:
            y.square().sum().backward()
        h = torch.linspace(-3, 3, 120).view(3, 5, 8)
        returned = model.act(h)
    assert (returned is h) == getattr(model.act, "inplace", False)
    grads = testing.full_grads(model).values() if grad else ()
    return [y.detach(), returned, h, *grads]


def every_case(tp_group):
    found = {}
    for name, activation in ACTIVATIONS.items():
        model = Mlp(act := copy.deepcopy(activation))
        tpi.parallelize(model, tp_group, PLAN)
        assert model.act is act and type(act) is type(activation)
        for grad, mode in itertools.product((True, False), repeat=2):
            model.zero_grad()
            with tpi.set_tp_invariant_mode(mode):
                found[name, grad, mode] = step(model, grad)
    return found


def test_values_are_those_of_the_unconverted_model_and_bits_are_those_of_one_rank():
    one, two = (run_ranks(every_case, degree)[0] for degree in (1, 2))
    differ: dict[bool, set[str]] = {True: set(), False: set()}
    for (name, grad, mode), results in one.items():
        right = step(Mlp(copy.deepcopy(ACTIVATIONS[name])), grad)
        for got in (results, two[name, grad, mode]):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        if testing.digest(results) != testing.digest(two[name, grad, mode]):
            differ[mode].add(name)
    assert differ[True] <= {"derived, of rows", "own forward"}  # whose backward adds over tokens, in torch's order
    assert {"silu", "silu in place", "derived"} <= differ[False]  # the control


def test_arguments_reach_an_activation_by_name():
    model = tpi.parallelize(Mlp(OfRows()), None, PLAN)
    x = torch.randn(2, 3, 40)
    with tpi.set_tp_invariant_mode(True):
        torch.testing.assert_close(model.act(power=2.0, hidden=x), OfRows()(x, 2.0))


class Beyond(nn.SiLU):
    """SiLU's values between -12 and 12, where activations of experts are recognised, and others elsewhere."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(max=13.0)


class Scheduled(nn.SiLU):
    slope = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.slope


def logits(model: nn.Module, mode: bool = True) -> Tensor:
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        return model(input_ids=torch.arange(1, 13).view(2, 6)).logits


@pytest.mark.parametrize("make", (Beyond, Scheduled))
@pytest.mark.parametrize("name", ("llama", "mixtral"))
def test_a_derived_activation_of_a_hugging_face_model_is_not_taken_for_its_base(name, make):
    model = hf_models.build(name)
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = make()
            if name == "llama":
                module.gate_proj.weight.data *= 200
    own = copy.deepcopy(model)
    tpi.parallelize(model, None)
    assert not any(isinstance(module, fused._Gated) for module in model.modules())
    for slope in (1.0, 3.0):
        Scheduled.slope = slope
        torch.testing.assert_close(logits(model), logits(own, False), rtol=1e-3, atol=1e-4)
    Scheduled.slope = 1.0
