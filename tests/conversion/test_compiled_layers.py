"""torch.compile of a parallelized model's layers, one by one: equal layers share a graph, and the bits are eager's."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import hf_models
import pytest
import torch
from meshes import init_device_mesh
from ranks import run_ranks
from torch._dynamo.testing import CompileCounterWithBackend

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core import module_hooks
from tp_invariant.testing import assert_bitwise_equal

LAYERS = 4


def compile_layers(model: Any, dynamic: bool | None = None, backend: str = "aot_eager") -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter, dynamic=dynamic)
    return counter


def shorter(step: int, length: int) -> dict[str, torch.Tensor]:
    return {name: x[:, :length].contiguous() for name, x in hf_models.batch(step).items()}


def graphs(tp_group: Any, family: str, kind: str, sequence_parallel: bool, dynamic: bool | None = None) -> list[int]:
    """Graphs after each of three steps; the last two have another batch or, with `dynamic`, another length."""
    torch.compiler.reset()
    # with a cache the code reads the number of its layer, and transformers has a graph for each layer, too
    model = hf_models.build(family, num_hidden_layers=LAYERS, use_cache=False)
    where = init_device_mesh("cpu", (tp_group.size(),), mesh_dim_names=("tp",)) if kind == "mesh" else tp_group
    tpi.parallelize(model, where, sequence_parallel=sequence_parallel)
    counter = compile_layers(model, dynamic)
    found = []
    # torch 2.11 takes the lengths that a graph keeps for tensors whose memory backward may use
    config = importlib.import_module("torch._functorch.config")
    donated = config.donated_buffer and not (dynamic and torch.__version__ < "2.13")
    with config.patch(donated_buffer=donated), tpi.set_tp_invariant_mode(True):
        for step in range(3):
            inputs = shorter(0, (24, 16, 20)[step]) if dynamic else hf_models.batch(2 * step)
            model(**inputs).loss.backward()
            found.append(counter.frame_count)
    torch.compiler.reset()
    return found


def check(found: list[int], family: str, more: int = 0) -> None:
    # the first layer also scatters, so it is another one; a sliding window is no tensor, as transformers' mask is
    kinds = len(set(getattr(hf_models.build(family).config, "layer_types", None) or ["full"]))
    assert found[0] <= kinds + 1 + more < LAYERS, (found, kinds)
    assert len(set(found)) == 1, f"layers were compiled again: {found}"


def test_equal_layers_share_a_graph():
    """Of two kinds."""
    check(graphs(None, "gemma2", "group", False), "gemma2")


@pytest.mark.more
def test_equal_layers_share_a_graph_over_a_mesh():
    for found in run_ranks(graphs, 2, "qwen3", "mesh", False):
        check(found, "qwen3")


@pytest.mark.more
def test_other_lengths_need_no_other_graph():
    for found in run_ranks(graphs, 2, "llama", "group", True, True):
        check(found, "llama", 1)  # transformers' own layers have a second graph, too, in the first step


@pytest.mark.more
def test_torchs_own_keys_would_not_do(monkeypatch):
    """The control: with the numbers that torch gives hooks, each layer has a graph of its own."""
    for module in (
        "functional.attention_choice", "hugging_face.models", "hugging_face.experts", "hugging_face.shared_keys",
        "conversion.convert", "styles.activations",
    ):  # fmt: skip
        monkeypatch.setattr(f"tp_invariant.{module}.with_key", lambda handle, name: handle)
    assert graphs(None, "qwen3", "group", False)[0] >= LAYERS


def step(tp_group: Any, sequence_parallel: bool, backend: str | None, mode: bool) -> tuple[dict[str, Any], list[int]]:
    """The results of a step, and the graphs after it and after another batch."""
    torch.compiler.reset()
    model = hf_models.build("qwen3", num_hidden_layers=LAYERS, use_cache=False)
    tpi.parallelize(model, tp_group, sequence_parallel=sequence_parallel)
    found = []
    with tpi.set_tp_invariant_mode(mode):
        counter = compile_layers(model, backend=backend) if backend else None
        results = hf_models.train(model, tp_group, 1)
        if counter is not None:
            found.append(counter.frame_count)
            model(**hf_models.batch(2)).loss.backward()
            found.append(counter.frame_count)
    torch.compiler.reset()
    return results, found


def test_bits_are_those_of_eager_layers_and_equal_layers_share_a_graph():
    """With the mode off they are others, at TP=1 already; test_compile_inductor.py compiles with the mode off."""
    ((eager, _),), ((off, _),) = (run_ranks(step, 1, False, None, mode) for mode in (True, False))
    for backend in ("aot_eager", "eager"):  # of the second, autograd's graph shows each operator of a layer
        for results, found in run_ranks(step, 2, True, backend, True):
            assert_bitwise_equal(results, eager)
            check(found, "qwen3")
            assert testing.digest(results["parameters"]) != testing.digest(off["parameters"])


def of_mixture(compiled: bool, fullgraph: bool = False) -> dict[str, Any]:
    torch.compiler.reset()
    model = tpi.parallelize(hf_models.build("mixtral", num_hidden_layers=1, use_cache=False), None)
    if compiled:
        model.model.layers[0].compile(backend="aot_eager", fullgraph=fullgraph)
    with tpi.set_tp_invariant_mode(True):
        results = hf_models.train(model, None, 1)
    torch.compiler.reset()
    return results


def test_a_router_that_normalises_in_place():
    """Its top-k breaks no graph: with the values as an input of the next one backward would raise. Experts break it."""
    assert_bitwise_equal(of_mixture(True), of_mixture(False))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the routing decides how many rows a rank has"):
        of_mixture(True, fullgraph=True)


def whole_model(tp_group: Any, compiled: bool) -> tuple[list[Any], list[int]]:
    """Losses and gradients of three steps, and after each how many graphs there are."""
    torch.compiler.reset()
    model = hf_models.build("qwen3", num_hidden_layers=1, use_cache=False)
    tpi.parallelize(model, tp_group, sequence_parallel=True)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, backend=counter) if compiled else model
    results, found = [], []
    with tpi.set_tp_invariant_mode(True):
        for step in range(3):
            model.zero_grad()
            loss = call(**hf_models.batch(2 * step)).loss
            loss.backward()
            results.append((loss.detach(), testing.full_grads(model)))
            found.append(counter.frame_count)
    torch.compiler.reset()
    return results, found


def test_a_whole_model():
    """Graphs break where transformers describes its mask; the bits are eager's."""
    ((want, _),) = run_ranks(whole_model, 1, False)
    for got, found in run_ranks(whole_model, 2, True):
        assert_bitwise_equal(got, want)
        assert found[0] > 0 and found[1] == found[2], found


# --- the keys -------------------------------------------------------------------------------------------------------


def test_keys_of_hooks():
    module = torch.nn.Linear(2, 2)
    calls: list[str] = []

    def note(name: str) -> Any:
        def hook(*args: Any) -> None:
            calls.append(name)

        return hook

    theirs = module.register_forward_hook(note("theirs"))
    handles = [
        module_hooks.with_key(module.register_forward_hook(note(str(i)), always_call=bool(i)), "a") for i in range(3)
    ]
    with_kwargs = module.register_forward_hook(lambda module, args, kwargs, out: calls.append("k"), with_kwargs=True)
    module_hooks.with_key(with_kwargs, "b")
    assert list(module._forward_hooks) == [
        theirs.id, "tp_invariant.a", "tp_invariant.a.2", "tp_invariant.a.3", "tp_invariant.b",
    ]  # fmt: skip
    copied = copy.deepcopy(module)
    module(torch.ones(2))
    assert calls == ["theirs", "0", "1", "2", "k"]
    handles[1].remove()
    with_kwargs.remove()
    calls.clear()
    module(torch.ones(2))
    assert calls == ["theirs", "0", "2"]
    assert set(module._forward_hooks_always_called) == {"tp_invariant.a.3"} and not module._forward_hooks_with_kwargs
    calls.clear()
    copied(torch.ones(2))
    assert calls == ["theirs", "0", "1", "2", "k"]


def test_only_the_last_hook_gets_a_key():
    module = torch.nn.Linear(2, 2)
    first = module.register_forward_hook(lambda *args: None)
    module.register_forward_hook(lambda *args: None)
    with pytest.raises(AssertionError, match="not the last one"):
        module_hooks.with_key(first, "a")
