"""Programs of two small layers that test_compile.py compiles as a whole: clipping, checkpoints, optimizers, backward.

They are in a file that ranks can import, since torch 2.11 imports the file of what it traces.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable as enable_compiled_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import wide_randn


class Steps:
    """Two blocks of two layers, and their training steps; `inner` is what a checkpoint recomputes."""

    def __init__(self, tp_group: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.checkpointed = False
        self.up = tpi.LayerNormLinear(32, 48, normalization="RMSNorm", parallel_mode="column", tp_group=tp_group)
        self.down = tpi.Linear(48, 32, parallel_mode="row", tp_group=tp_group)
        self.model = nn.ModuleList((self.up, self.down))

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x.square().sum()

    def backward(self, call: Any = None, seed: int = 1) -> dict[str, Any]:
        """All gradients of `call`'s loss, whole."""
        self.model.zero_grad()
        x = wide_randn(6, 32, generator=torch.Generator().manual_seed(seed), spread=1).requires_grad_()
        (call or self)(x).backward()
        return {"x": x.grad, **testing.full_grads(self.model)}


def clipped(tp_group: Any) -> list[Any]:
    steps = Steps(tp_group)
    parameters = list(steps.model.parameters())

    def clip() -> Tensor:
        return tpi.clip_grad_norm_(parameters, 0.5, tp_group=tp_group) * 1.0

    found = []
    with tpi.set_tp_invariant_mode(True):
        for call in (clip, torch.compile(clip, backend="inductor")):
            steps.backward()
            found.append((call(), testing.full_grads(steps.model)))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="it moves bytes between ranks"):
            torch.compile(clip, backend="eager", fullgraph=True)()
    return found


def compiled_backward(tp_group: Any) -> list[Any]:
    steps = Steps(tp_group)
    with tpi.set_tp_invariant_mode(True):
        results = [steps.backward()]
        for call in (steps, torch.compile(steps.__call__, backend="aot_eager", fullgraph=True)):
            with enable_compiled_autograd(torch.compile(backend="aot_eager")):
                results.append(steps.backward(call))
        # named so, since a rank is sent no module of settings
        with importlib.import_module("torch._dynamo.config").patch(compiled_autograd=True):
            train = torch.compile(lambda x: steps(x).backward(), backend="aot_eager")
            steps.model.zero_grad()
            x = wide_randn(6, 32, generator=torch.Generator().manual_seed(1), spread=1).requires_grad_()
            train(x)
            results.append({"x": x.grad, **testing.full_grads(steps.model)})
    return results


def checkpointed(tp_group: Any) -> list[Any]:
    steps = Steps(tp_group)
    with tpi.set_tp_invariant_mode(True):
        results = [steps.backward()]
        steps.checkpointed = True
        call = torch.compile(steps.__call__, backend="aot_eager", fullgraph=True)
        if tp_group.size() > 1:
            with pytest.raises((AssertionError, RuntimeError)):  # torch's
                steps.backward(call)
            torch.compiler.reset()
            steps.inner = torch.compile(steps.inner, backend="aot_eager", fullgraph=True)
            call = steps
        results.append(steps.backward(call))
    return results


def in_cuda_graphs(tp_group: Any) -> list[Any]:
    """Gradients of two steps, and how many groups the scheduler then knows: eager, compiled, as in CUDA graphs, off.

    A setting of inductor's says that torch makes CUDA graphs; mode="reduce-overhead" makes it.
    """
    inductor = importlib.import_module("torch._inductor.config")
    found = []
    for compiled, graphs, mode in ((False, False, True), (True, False, True), (True, True, True), (True, True, False)):
        tpi.owners.weight_cache.clear()
        steps = Steps(tp_group)
        call = torch.compile(steps.__call__, backend="aot_eager", fullgraph=True) if compiled else steps
        with tpi.set_tp_invariant_mode(mode), inductor.patch({"triton.cudagraphs": graphs}):
            grads = [steps.backward(call, seed) for seed in (1, 2)]
        found.append((grads, len(tpi.owners.weight_cache._groups)))
    return found


def compiled_steps(tp_group: Any, dtype: torch.dtype = torch.float32, compiled: bool = True) -> list[Any]:
    """Parameters after each of three steps of a compiled optimizer, gathered weights being kept from use to use."""
    steps = Steps(tp_group)
    steps.model.to(dtype)
    optimizer = torch.optim.SGD(steps.model.parameters(), lr=1e-2, momentum=0.9)
    step = torch.compile(optimizer.step) if compiled else optimizer.step
    call = torch.compile(steps.__call__, backend="aot_eager", fullgraph=True) if compiled else steps
    results = []
    tpi.owners.weight_cache.keep = 8
    try:
        with tpi.set_tp_invariant_mode(compiled):
            for seed in range(3):
                steps.model.zero_grad()
                x = wide_randn(6, 32, generator=torch.Generator().manual_seed(seed), spread=1).to(dtype)
                call(x).backward()
                step()
                full = testing.full_parameters(steps.model)
                results.append({name: p.detach().clone() for name, p in full.items()})
    finally:
        tpi.owners.weight_cache.keep = 0
        tpi.owners.weight_cache.clear()
    return results


def loss_over_a_mesh(tp_group: Any) -> list[Tensor]:
    """Of a function that is given a DeviceMesh, eager and compiled."""
    mesh = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))
    logits, target = torch.randn(4, 8, generator=torch.Generator().manual_seed(tp_group.rank())), torch.arange(4)

    def loss(x: Tensor) -> Tensor:
        return tpi.vocab_parallel_cross_entropy(x, target, tp_group=mesh)

    torch.compiler.reset()
    with tpi.set_tp_invariant_mode(True):
        return [call(logits) for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager"))]
