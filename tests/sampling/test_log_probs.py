"""token_log_probs and linear_cross_entropy: bytes of the product and the loss apart, at every degree and chunk."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpus import gpu
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.core.layout import shard
from tp_invariant.functional.linear_cross_entropy import CHUNK, Scores
from tp_invariant.testing import assert_bitwise_equal

GPUS = testing.gpu_ranks()
VOCABULARY, PADDED, FEATURES, TOKENS = 235, 240, 48, (2, 72)


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    loss: bool = False  # linear_cross_entropy, else token_log_probs and entropies
    options: tuple[tuple[str, Any], ...] = ()
    support: bool = False
    bias: bool = True
    layer: tuple[tuple[str, Any], ...] = ()  # of the Linear
    chunk: int = CHUNK
    mode: bool = True
    mesh: bool = False
    device: str = "cpu"

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def data(case: Case) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(*TOKENS, FEATURES, generator=g).to(case.dtype)
    weight = (torch.randn(PADDED, FEATURES, generator=g) * 0.4).to(case.dtype)
    bias = torch.randn(PADDED, generator=g).to(case.dtype)
    ids = torch.randint(0, VOCABULARY, TOKENS, generator=g)
    support = torch.rand(*TOKENS, VOCABULARY, generator=g).argsort(-1)[..., :30]
    support[..., 0] = ids
    support[0, :9, 12:] = -1
    support[1, 5] = -1  # the whole vocabulary
    ids[0, 4:7] = -100
    ids[1, 3] = next(i for i in range(VOCABULARY) if i not in support[1, 3])  # which cannot be drawn
    grad = torch.randn(2, *TOKENS, generator=g)
    grad[:, 1, 3] = 0.0  # of log-probability -inf
    return dict(hidden=hidden, weight=weight, bias=bias, ids=ids, support=support, grad=grad)


def run(tp_group: Any, case: Case) -> dict[str, Tensor]:
    """Results and gradients, whole, on every rank."""
    group = resolve_group(tp_group)
    full = {name: tensor.to(case.device) for name, tensor in data(case).items()}
    options = dict(parallel_mode="column", **dict(case.layer))
    head = tpi.Linear(FEATURES, PADDED, case.bias, tp_group=tp_group, dtype=case.dtype, device=case.device, **options)
    tpi.load_full_state_dict(head, {name: full[name] for name, _ in head.named_parameters()})
    sp = bool(options.get("sequence_parallel"))
    hidden = shard(full["hidden"], dim=1, rank=group.rank, world=group.size) if sp else full["hidden"]
    hidden = hidden.clone().requires_grad_()
    named = dict(case.options, vocab_size=VOCABULARY, chunk=case.chunk)
    if case.support:
        named["support"] = full["support"]
    with tpi.set_tp_invariant_mode(case.mode):
        if case.loss:
            loss = tpi.linear_cross_entropy(hidden, head, full["ids"], **named)
            loss.backward(full["grad"][0] if loss.dim() else full["grad"][0, 0, 0])
            results = {"loss": loss}
        else:
            log_probs, entropies = tpi.token_log_probs(hidden, head, full["ids"], return_entropy=True, **named)
            torch.autograd.backward((log_probs, entropies), tuple(full["grad"]))
            results = {"log_probs": log_probs, "entropies": entropies}
    results["dhidden"] = gather_dim(hidden.grad, 1, group) if sp else hidden.grad
    for name, parameter in head.named_parameters():
        grad = parameter.grad.full_tensor() if case.mesh and group.size > 1 else gather_dim(parameter.grad, 0, group)
        results[f"d{name}"] = grad
    return {name: value.detach().cpu() for name, value in results.items()}


def run_on_mesh(tp_group: Any, case: Case) -> dict[str, Tensor]:
    return run(DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",)), case)


CASES = {
    "log-probabilities": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "temperature and support": Case(dtype=torch.bfloat16, options=(("temperature", 0.7),), support=True),
    "scaled, capped, fp32": Case(
        dtype=torch.bfloat16, options=(("logit_scale", 0.3), ("softcap", 4.0), ("fp32_logits", True)), bias=False
    ),
    "sequence-parallel": Case(layer=(("sequence_parallel", True), ("sequence_dim", 1))),
    "gather_output": Case(layer=(("gather_output", True),), support=True),
    "loss": Case(loss=True, options=(("label_smoothing", 0.1), ("z_loss", 1e-3))),
    "loss of each token": Case(loss=True, dtype=torch.float16, options=(("reduction", "none"), ("softcap", 8.0))),
    "summed": Case(loss=True, dtype=torch.bfloat16, options=(("reduction", "sum"),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_at_every_degree_and_chunk(name):
    case = CASES[name]
    one = run(None, case.with_(layer=()))
    for degree, chunk in ((1, 37 * PADDED), (2, CHUNK), (3, 20 * PADDED), (4, 11 * PADDED), (8, 9 * PADDED)):
        here = case.with_(chunk=chunk)
        for result in run_ranks(run, degree, here) if degree > 1 else [run(None, here)]:
            assert_bitwise_equal(result, one)


def test_with_the_mode_off_they_differ():
    case = Case(mode=False)
    one, two = run(None, case), run_ranks(run, 4, case)[0]
    for name in ("log_probs", "entropies", "dhidden"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-4)
        assert not torch.equal(two[name], one[name])


def test_over_a_mesh():
    one = run(None, Case())
    for result in run_ranks(run_on_mesh, 2, Case(mesh=True, chunk=29 * PADDED)):
        assert_bitwise_equal(result, one)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("support", [True, False])
def test_values_are_those_of_float64(support, mode):
    case = Case(options=(("temperature", 0.7), ("softcap", 6.0)), support=support, mode=mode)
    full = data(case)
    x, weight, bias = (full[name].double().requires_grad_() for name in ("hidden", "weight", "bias"))
    scores = (torch.tanh(F.linear(x, weight, bias)[..., :VOCABULARY] / 6.0) * 6.0) / 0.7
    if support:
        kept = F.one_hot(full["support"].clamp(min=0), VOCABULARY).mul((full["support"] >= 0).unsqueeze(-1)).sum(-2) > 0
        scores = scores.masked_fill(~(kept | (full["support"] < 0).all(-1, keepdim=True)), -1e30)
    log_p, ids = scores.log_softmax(-1), full["ids"]
    counts = ids >= 0
    log_probs = log_p.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~counts, 0.0)
    entropies = -(log_p.exp() * log_p).sum(-1).masked_fill(~counts, 0.0)
    torch.autograd.backward((log_probs, entropies), tuple(full["grad"].double()))
    found = run(None, case)
    if support:
        assert found["log_probs"][1, 3] == -torch.inf and log_probs[1, 3] < -1e29
        found["log_probs"][1, 3] = log_probs.data[1, 3] = 0.0
    expected = dict(log_probs=log_probs, entropies=entropies, dhidden=x.grad, dweight=weight.grad, dbias=bias.grad)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.detach(), rtol=3e-5, atol=3e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_layer_and_the_loss_apart(dtype):
    """Also of log_softmax inside of batch_invariant, and of this package's own for a sampler."""
    full = data(Case(dtype=dtype))
    head = nn.Linear(FEATURES, VOCABULARY, dtype=dtype)
    layer = tpi.Linear.from_linear(head, parallel_mode=None, tp_group=None)
    hidden, target = full["hidden"].requires_grad_(), full["ids"]
    with tpi.set_tp_invariant_mode(True):
        logits = layer(hidden)
        apart = tpi.vocab_parallel_cross_entropy(logits, target, tp_group=None, reduction="none")
        apart.sum().backward()
        grads, hidden.grad = [hidden.grad, layer.weight.grad, layer.bias.grad], None
        log_probs = tpi.token_log_probs(hidden, head, target, chunk=VOCABULARY * 17)
        (-log_probs).sum().backward()
        assert_bitwise_equal([hidden.grad, head.weight.grad, head.bias.grad], grads)
        assert_bitwise_equal(log_probs.detach(), 0.0 - apart.detach())
        wanted = log_probs.detach().masked_fill(target < 0, 0.0)
        for found in (tpi.sampling.log_softmax(logits), _batch_invariant(logits.detach())):
            picked = found.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target < 0, 0.0)
            assert_bitwise_equal(picked, wanted)


def _batch_invariant(logits: Tensor) -> Tensor:
    with tpi.batch_invariant():
        return F.log_softmax(logits.float(), -1)


def test_log_softmax_divides_by_the_temperature_first():
    logits = torch.randn(5, 300)
    torch.testing.assert_close(tpi.sampling.log_softmax(logits, temperature=0.5), (logits / 0.5).log_softmax(-1))


def test_compiled():
    full = data(Case())
    head = tpi.Linear(FEATURES, VOCABULARY)

    def step(hidden: Tensor) -> Tensor:
        log_probs, entropies = tpi.token_log_probs(hidden, head, full["ids"], return_entropy=True)
        return (log_probs * full["grad"][0]).sum() + entropies.sum()

    with tpi.set_tp_invariant_mode(True):
        results = []
        for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            hidden = full["hidden"].clone().requires_grad_()
            head.weight.grad = None
            value = function(hidden)
            value.backward()
            results.append([value.detach(), hidden.grad, head.weight.grad])
    assert_bitwise_equal(results[1], results[0])


def test_gradients_are_added_to_main_grad():
    full = data(Case())
    grads = []
    for fused in (False, True):
        torch.manual_seed(0)
        head = tpi.Linear(FEATURES, VOCABULARY, fuse_wgrad_accumulation=fused)
        head.weight.main_grad = torch.ones_like(head.weight)
        with tpi.set_tp_invariant_mode(True):
            tpi.linear_cross_entropy(full["hidden"], head, full["ids"], chunk=VOCABULARY * 40).backward()
        grads.append(head.weight.main_grad if fused else head.weight.grad + 1)
    assert_bitwise_equal(*grads)


def test_frozen_heads_and_no_tokens():
    head = tpi.Linear(FEATURES, VOCABULARY).requires_grad_(False)
    hidden = torch.randn(0, FEATURES, requires_grad=True)
    with tpi.set_tp_invariant_mode(True):
        log_probs = tpi.token_log_probs(hidden, head, torch.zeros(0, dtype=torch.long))
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and hidden.grad.shape == (0, FEATURES)


def test_a_models_own_cap_is_that_of_scores():
    """As Gemma 2 computes it in the logits' dtype."""
    logits = torch.randn(4, 301).bfloat16() * 20
    own = torch.tanh(logits / 30.0) * 30.0
    torch.testing.assert_close(Scores(False, 1.0, 30.0, 1.0).of(logits), own, rtol=0.01, atol=0)


HEADS = {
    "an adapter": (lambda: nn.Sequential(nn.Linear(4, 8)), TypeError, "lm_head is a Sequential"),
    "row-parallel": (lambda: tpi.Linear(4, 8, parallel_mode="row"), ValueError, "must be column-parallel"),
    "stacked": (lambda: tpi.Linear(4, 8, parallel_mode="column", partition_stride=2), ValueError, "partition_stride=2"),
    "a norm": (lambda: tpi.LayerNormLinear(4, 8), TypeError, "lm_head is a LayerNormLinear"),
    "a hook": (lambda: _hooked(nn.Linear(4, 8)), ValueError, "forward hooks"),
    "other features": (lambda: nn.Linear(5, 8), ValueError, r"hidden has shape \(3, 4\)"),
    "another dtype": (lambda: nn.Linear(4, 8, dtype=torch.bfloat16), TypeError, "weight of lm_head torch.bfloat16"),
}


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda module, args: None)
    return module


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_refused(name):
    make, kind, text = HEADS[name]
    with pytest.raises(kind, match=text):
        tpi.token_log_probs(torch.randn(3, 4), make(), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(temperature=0.0), "temperature=0.0"),
        (dict(softcap=-1.0), "softcap=-1.0"),
        (dict(vocab_size=9), "vocab_size=9"),
        (dict(chunk=0), "chunk=0"),
        (dict(support=torch.zeros(2, 2, dtype=torch.long)), "support is torch.int64"),
    ],
)
def test_options_that_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        tpi.token_log_probs(torch.randn(3, 4), nn.Linear(4, 8), torch.zeros(3, dtype=torch.long), **options)


@pytest.mark.parametrize("id", [-5, 8])
def test_supports_with_ids_out_of_range_are_refused(id):
    support = torch.tensor([[1, 2, -1], [0, id, -1], [-1, -1, -1]])
    with pytest.raises(IndexError, match=str(id)):
        tpi.token_log_probs(torch.randn(3, 4), nn.Linear(4, 8), torch.zeros(3, dtype=torch.long), support=support)


def _ranks_differ(tp_group: Any) -> str:
    head = tpi.Linear(8, 16, parallel_mode="column", tp_group=tp_group)
    with tpi.set_tp_invariant_mode(True), pytest.raises(RuntimeError) as error:
        tpi.token_log_probs(
            torch.zeros(3, 8), head, torch.zeros(3, dtype=torch.long), temperature=1.0 + tp_group.rank()
        )
    return str(error.value)


def _sharded_over_data(tp_group: Any) -> str:
    model = fully_shard(nn.Sequential(nn.Linear(8, 16)), mesh=DeviceMesh.from_group(tp_group, "cpu"))
    with tpi.set_tp_invariant_mode(True), pytest.raises(ValueError) as error:
        tpi.token_log_probs(torch.zeros(3, 8), model[0], torch.zeros(3, dtype=torch.long))
    model.unshard()
    with tpi.set_tp_invariant_mode(True):
        assert tpi.token_log_probs(torch.zeros(3, 8), model[0], torch.zeros(3, dtype=torch.long)).shape == (3,)
    return str(error.value)


def test_heads_that_fully_shard_has_sharded():
    assert all("8 of 16 rows are here" in text for text in run_ranks(_sharded_over_data, 2))


def test_ranks_that_disagree():
    assert all("the options of token_log_probs" in text for text in run_ranks(_ranks_differ, 2))


@gpu
@pytest.mark.parametrize("degree", [1, *(d for d in (2, 4) if d <= GPUS)])
@pytest.mark.parametrize("name", [name for name in CASES if name != "loss of each token"])
def test_on_gpus(name, degree):
    case = CASES[name].with_(device="cuda")
    one = run(None, case.with_(layer=()))
    for chunk in (CHUNK, 37 * PADDED):
        here = case.with_(chunk=chunk)
        results = testing.run_ranks(run, degree, here) if degree > 1 else [run(None, here)]
        for result in results:
            assert_bitwise_equal(result, one)
