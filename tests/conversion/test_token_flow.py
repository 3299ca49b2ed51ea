"""Sequence parallelism of models whose code between the blocks mixes tokens, which no parameter and no shape shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.conversion import survey

H = 16


class Function(nn.Module):
    """Without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.function(x)


class Layer(nn.Module):
    def __init__(self, between: nn.Module | None = None, needed: bool = False) -> None:
        super().__init__()
        self.norm, self.other_norm, self.between = nn.LayerNorm(H), nn.RMSNorm(H), between or nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(H, 32), nn.GELU(), nn.Linear(32, H))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.between(self.mlp(self.norm(x)))
        return x + self.mlp(self.other_norm(x))


class NeedsMore(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), mask


class Stack(nn.Module):
    """embedded: whether it takes token ids."""

    def __init__(self, layers: list[nn.Module], between: Callable[[Tensor], Tensor], embedded: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, H) if embedded else nn.Identity()
        self.layers, self.norm, self.between = nn.ModuleList(layers), nn.LayerNorm(H), between

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).sin()
        for layer in self.layers:
            x = self.between(layer(x))
        return self.norm(x).cumsum(1)  # of all tokens


class NeedsMask(Stack):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x, _ = layer(x, mask.float())
        return self.norm(x)


PLAN: dict[str, Any] = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: x.roll(1, 1),
    "fft": lambda x: torch.fft.fft2(x).real,
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "maximum": lambda x: x * x.amax(1, keepdim=True),
    "place": lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None],
    "length": lambda x: x / x.shape[1],
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1), "by sequence": lambda x: x.flip(0) + x[:1], "clamped": lambda x: x.clamp(-1, 1),
}  # fmt: skip


def build(place: str, function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    if place == "module":
        return Stack([Layer(), Layer(Function(function))], lambda x: x)
    if place == "layer":
        return Stack([Layer(), Function(function), Layer()], lambda x: x, embedded=False)
    if place == "model":
        return Stack([Layer(), Layer()], function)
    if place == "unknown arguments":
        return NeedsMask([NeedsMore(Function(function))], lambda x: x, embedded=False)
    model = hf_models.build("llama")
    model.model.layers.insert(1, Function(function))  # in the place of the second layer: two are called
    return model


def refusal(model: nn.Module, tp_group: Any = None) -> str:
    plan = None if hasattr(model, "config") else PLAN
    try:
        tpi.parallelize(model, tp_group, plan, sequence_parallel=True)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*MIXING, *RIGHT])
def test_what_mixes_tokens_is_refused_and_nothing_else(name):
    function = (MIXING | RIGHT)[name]
    for place, where in (
        ("module", "layers.1.mlp: the hidden states"),
        ("layer", "layers.2.mlp: the hidden states"),
        ("model", "layers.1.mlp: the hidden states"),
        ("unknown arguments", "layers.0.mlp: the hidden states"),
    ):
        for device in ("cpu", "meta"):
            said = refusal(build(place, function).to(device))
            assert (where in said) == (name in MIXING), (place, device, said)
            if name == "shift" and place == "module":
                assert "(first in the output of layers.1.between)" in said
    tpi.parallelize(build("module", function), None, PLAN)  # without sequence parallelism


def on_rank(tp_group: Any, name: str, sp: bool) -> Tensor:
    model = build("module", (MIXING | RIGHT)[name])
    with mock.patch.object(survey, "mixed_tokens", lambda *args: ("", "")):
        tpi.parallelize(model, tp_group, PLAN, sequence_parallel=sp)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        return model(torch.arange(16).view(2, 8))


def test_without_the_check_they_would_be_wrong():
    for name in ("shift", "place", "softmax"):
        (want,) = testing.run_ranks(on_rank, 1, name, False, device="cpu")
        for got in testing.run_ranks(on_rank, 2, name, True, device="cpu"):
            assert torch.equal(got, want) == (name in RIGHT)


def test_hugging_face_models():
    family = functools.partial(build, "hugging face")
    assert "model.norm: the hidden states of a token" in refusal(family(MIXING["shift"]))
    assert refusal(family(RIGHT["clamped"])) == ""
