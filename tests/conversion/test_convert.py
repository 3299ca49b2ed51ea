"""parallelize: Hugging Face decoders and plain modules, the same bits at every degree; and what it refuses."""

from __future__ import annotations

import copy
import functools
import os
import re
import subprocess
import sys
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from cases import more
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.conversion.convert import parallelize
from tp_invariant.conversion.plans import Part, own_plan
from tp_invariant.examples import swap_linear
from tp_invariant.kernels.gemm import reference
from tp_invariant.testing import assert_bitwise_equal

STEPS = 2  # the second one with padding
# (family, degree, sequence_parallel)
CASES = [
    *((family, 4, True) for family in hf_models.FAMILIES),
    *((family, 4, False) if family == "qwen3" else more(family, 4, False) for family in hf_models.FAMILIES),
    *((family, 2, False) for family in ("qwen3", "phi3")),
]


def train_on_rank(tp_group, family, dtype, sequence_parallel, mode, steps):
    model = parallelize(hf_models.build(family, dtype), tp_group, sequence_parallel=sequence_parallel)
    with tpi.set_tp_invariant_mode(mode):
        return hf_models.train(model, tp_group, steps)


@functools.cache
def trained(family: str, dtype: torch.dtype = torch.float32, mode: bool = True, steps: int = STEPS) -> Any:
    """At TP=1, once for all degrees."""
    return run_ranks(train_on_rank, 1, family, dtype, False, mode, steps)[0]


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, degree, sp", CASES, ids=str)
def test_training_has_the_same_bits_at_every_degree(family, degree, sp):
    expected = trained(family)
    results = run_ranks(train_on_rank, degree, family, torch.float32, sp, True, STEPS)
    assert len(results) == degree
    for rank, got in enumerate(results):
        assert_bitwise_equal(got, expected, f"{family} on rank {rank} of {degree}, SP {sp}")
    assert all(g is not None and g.abs().max() > 0 for g in expected["grads"].values())


@pytest.mark.parametrize("sp", [more(False), True], ids=["", "sp"])
def test_training_in_bfloat16(sp):
    expected = trained("qwen3", torch.bfloat16, steps=2)
    for got in run_ranks(train_on_rank, 4, "qwen3", torch.bfloat16, sp, True, 2):
        assert_bitwise_equal(got, expected)


@pytest.mark.parametrize("family", ["qwen3", more("phi3"), more("gemma2")])
def test_with_the_mode_off_the_bits_depend_on_the_degree(family):
    """The control; and the stock path is right: it is near the mode's result."""
    one = trained(family, mode=False, steps=1)
    on = trained(family)
    for sp in (False, True):
        for got in run_ranks(train_on_rank, 4, family, torch.float32, sp, False, 1):
            assert not torch.equal(got["logits"], one["logits"])
            for name in one["grads"]:
                torch.testing.assert_close(got["grads"][name], on["grads"][name], rtol=1e-3, atol=1e-5)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(one["logits"], on["logits"])


@pytest.mark.parametrize("family", sorted(hf_models.FAMILIES))
def test_near_the_model_itself(family):
    hf_models.assert_near_the_model_itself(trained(family), family, 16 * torch.finfo(torch.float32).eps)


def test_threads_do_not_count():
    """A whole step on two threads, here, against ranks with one each."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        here = train_on_rank(None, "gemma2", torch.float32, False, True, 2)
    finally:
        torch.set_num_threads(threads)
    assert_bitwise_equal(here, trained("gemma2"))


@pytest.mark.parametrize("family", sorted(hf_models.FAMILIES))
def test_with_the_mode_off_attention_and_loss_are_the_models_own(family):
    """All but norms and the order of stock layers is the untouched model's: the same function gets the same numbers."""
    full, seen = hf_models.build(family), []
    model = parallelize(copy.deepcopy(full), None)
    with tpi.set_tp_invariant_mode(False):
        for m in (full, model):
            seen.append(m(**hf_models.batch(1), num_items_in_batch=torch.tensor(40)))
    torch.testing.assert_close(seen[1].logits, seen[0].logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[1].loss, seen[0].loss, rtol=1e-5, atol=0)
    with tpi.set_tp_invariant_mode(True):
        on = model(**hf_models.batch(1), num_items_in_batch=torch.tensor(40))
    torch.testing.assert_close(on.loss, seen[0].loss, rtol=1e-5, atol=0)
    assert not torch.equal(on.logits, seen[1].logits)


# --- the model afterwards -------------------------------------------------------------------------------------------


def generate_on_rank(tp_group, mode):
    model = parallelize(hf_models.build("qwen3"), tp_group).eval()
    with tpi.set_tp_invariant_mode(mode):
        out = model.generate(
            hf_models.batch()["input_ids"][:, :6], max_new_tokens=8, min_new_tokens=8, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def test_generate_with_a_cache():
    ((ids, logits),) = run_ranks(generate_on_rank, 1, True)
    assert ids.shape == (2, 14)
    for degree in (2, 4):
        for other_ids, other_logits in run_ranks(generate_on_rank, degree, True):
            assert_bitwise_equal(other_ids, ids)
            assert_bitwise_equal(other_logits, logits)
    assert not torch.equal(run_ranks(generate_on_rank, 4, False)[0][1], logits)
    model = hf_models.build("qwen3").eval()
    whole = model(input_ids=ids[:, :-1]).logits[:, 5:]
    torch.testing.assert_close(logits.transpose(0, 1), whole, rtol=1e-4, atol=1e-4)


def look_on_rank(tp_group, family):
    full = hf_models.build(family)
    model = parallelize(copy.deepcopy(full), tp_group, sequence_parallel=True)
    assert list(model.state_dict()) == list(full.state_dict())
    assert_bitwise_equal(tpi.testing.full_parameters(model), dict(full.named_parameters(remove_duplicate=False)))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (full.lm_head.weight is full.model.embed_tokens.weight)
    twin = copy.deepcopy(model)  # hooks and groups come along
    with tpi.set_tp_invariant_mode(True):
        assert_bitwise_equal(twin(**hf_models.batch()).logits, model(**hf_models.batch()).logits)
    return {n: tuple(p.shape) for n, p in model.named_parameters()}, tied


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_weights_names_and_ties_are_kept(family):
    for shapes, tied in run_ranks(look_on_rank, 4, family):
        assert tied == (family == "qwen3")
        assert shapes["model.embed_tokens.weight"] == (24, 64)
        assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 32)
        if family == "phi3":
            assert shapes["lm_head.weight"] == (24, 64)
            assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (64, 64)
            assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (32, 64)


def test_fused_gate_and_up_are_not_gathered():
    model = parallelize(hf_models.build("phi3"), None)
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    assert (mlp.gate_up_proj.partition_stride, mlp.gate_up_proj.gather_output) == (2, False)
    assert mlp.down_proj.input_is_parallel
    assert attention.qkv_proj.gather_output
    assert not attention.o_proj.input_is_parallel


def generated(tp_group, family, length, sequence_parallel):
    """Between steps of training, whose layers shard the sequence again; and a prompt that no degree divides."""
    model = parallelize(hf_models.build(family), tp_group, sequence_parallel=sequence_parallel)
    ids = hf_models.batch()["input_ids"][:, :length]
    with tpi.set_tp_invariant_mode(True):
        first = hf_models.train(model, tp_group, 1)
        out = model.eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        alone = model(input_ids=ids[:, :1]).logits.detach()  # with gradients
        refused = ""
        try:
            model(input_ids=ids[:, :7])
        except ValueError as error:
            refused = str(error)
        norm = model.model.layers[0].input_layernorm
        return first, out.sequences, list(out.logits), alone, hf_models.train(model.train(), tp_group, 1), refused, norm


@pytest.mark.parametrize(("family", "length"), [("qwen3", 8), ("qwen3", 9), ("qwen3_moe", 9)])
def test_generate_of_a_model_with_sequence_parallelism(family, length):
    *want, refused, _ = generated(None, family, length, True)
    assert not refused
    for *got, refused, norm in run_ranks(generated, 2, family, length, True):
        assert_bitwise_equal(got, want)
        assert "its size 7 is not divisible by TP degree=2" in refused and norm.sequence_parallel


def hidden_states_on_rank(tp_group, sequence_parallel):
    model = parallelize(hf_models.build("qwen3"), tp_group, sequence_parallel=sequence_parallel)
    with tpi.set_tp_invariant_mode(True):
        named = model(**hf_models.batch(), output_hidden_states=True, use_cache=False)
        plain = model(**hf_models.batch(), output_hidden_states=True, use_cache=False, return_dict=False)
    named.hidden_states[1].square().sum().backward()
    return named.hidden_states, plain, testing.full_grads(model)


def test_hidden_states_of_each_layer_are_whole():
    ((expected, *others),) = run_ranks(hidden_states_on_rank, 1, False)
    assert [tuple(x.shape) for x in expected] == [(2, 24, 64)] * 3
    for sequence_parallel in (False, True):
        for got in run_ranks(hidden_states_on_rank, 2, sequence_parallel):
            assert_bitwise_equal(got, (expected, *others))
    whole = hf_models.build("qwen3")(**hf_models.batch(), output_hidden_states=True).hidden_states
    for mine, theirs in zip(expected, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def attention_weights_on_rank(tp_group, implementation, mode):
    model = hf_models.build("qwen3")
    model.set_attn_implementation(implementation)
    parallelize(model, tp_group)
    with tpi.set_tp_invariant_mode(mode):
        try:
            return [tuple(x.shape) for x in model(**hf_models.batch(), output_attentions=True).attentions]
        except ValueError as error:
            return str(error)


def test_attention_weights_are_given_whole_or_refused():
    """transformers returned () for "sdpa", and each rank's own heads for "eager"."""
    (sdpa,), (eager,) = (run_ranks(attention_weights_on_rank, 1, name, False) for name in ("sdpa", "eager"))
    assert "attn_implementation='sdpa' has no weights to give; turn it off, or choose 'eager'" in sdpa
    assert eager == attention_weights_on_rank(None, "eager", True) == [(2, 8, 24, 24)] * 2
    for mode in (False, True):
        for text in run_ranks(attention_weights_on_rank, 2, "eager", mode):
            assert "a rank has the weights of its own heads only" in text


class Layer(nn.Module):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(64), nn.Linear(128, 64)
        self.up = nn.Sequential(nn.Linear(64, 128), nn.GELU())
        self.whole = nn.Sequential(nn.Linear(64, 64), nn.GELU()) if gather else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x))) + self.whole(x)


class Stack(nn.Module):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Layer(gather), Layer(gather)]), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


STACK_PLAN = {"layers.*.up.0": "colwise", "layers.*.norm": "replicate"}


def stack_on_rank(tp_group, gather, sp):
    torch.manual_seed(0)
    model = Stack(gather)
    if gather:  # the row-parallel layer in a block of its own as well: else nothing says where the region ends
        for layer in model.layers:
            layer.up = nn.Sequential(*layer.up, layer.down)
            layer.down = nn.Identity()
    plan = {"layers.*.up.2" if gather else "layers.*.down": "rowwise", **STACK_PLAN}
    if gather:
        plan["layers.*.whole.0"] = "colwise_gather_output"
    parallelize(model, tp_group, plan, sequence_parallel=sp)
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with tpi.set_tp_invariant_mode(True):
        y = model(x)
    y.square().mul(torch.arange(64)).sum().backward()
    return y.detach(), x.grad, testing.full_grads(model)


@pytest.mark.parametrize("gather", [False, True], ids=["row elsewhere", "gathers"])
def test_blocks_without_a_row_parallel_layer(gather):
    """Under sequence parallelism: one whose output another layer takes in parts, and one that gathers it itself."""
    ((y, dx, grads),) = run_ranks(stack_on_rank, 1, gather, False)
    for got in run_ranks(stack_on_rank, 4, gather, True):
        assert_bitwise_equal(got, (y, dx, grads))
    torch.manual_seed(0)
    model = Stack(gather)
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model(x).square().mul(torch.arange(64)).sum().backward()
    torch.testing.assert_close(dx, x.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(grads["layers.0.up.0.weight"], model.layers[0].up[0].weight.grad, rtol=1e-3, atol=1e-4)


class Attends(nn.Module):
    """Of hidden states that are given three times; flat: its result has the tokens of all sequences in one dim."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.flat = flat

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, 16)).transpose(1, 2) for x in (self.q(q), self.k(k), self.v(v)))
        y = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y.flatten(0, 1) if self.flat else y


class AttendingLayer(nn.Module):
    """case: how it calls its attention, which the plan leaves whole or shards."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.norm, self.other_norm, self.case = nn.LayerNorm(64), nn.LayerNorm(64), case
        self.attentions = nn.ModuleList([Attends(case == "flat")])
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        y, attention = self.norm(x), self.attentions[0]
        z = self.other_norm(x) if self.case == "another" else y
        if self.case == "inner":
            return x + attention.o(y) + self.mlp(y)
        x = x + (attention(q=y, k=z, v=z) if self.case == "by name" else attention(y, z, v=z)).view(x.shape)
        return x + self.mlp(x)


def attending_on_rank(tp_group, sp, sharded, case="", mode=True):
    torch.manual_seed(0)
    model = Stack(False)
    model.layers = nn.ModuleList([AttendingLayer(case) for _ in range(2)])
    alone = copy.deepcopy(model)
    plan = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
    if sharded:
        plan |= {f"layers.*.attentions.0.{name}": "colwise" for name in "qkv"} | {"layers.*.attentions.0.o": "rowwise"}
    results = []
    try:
        parallelize(model, tp_group, plan, sequence_parallel=sp)
        for one in (model, alone):
            x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with tpi.set_tp_invariant_mode(mode):
                y = one(x)
            y.square().mul(torch.arange(64)).sum().backward()
            results.append((y.detach(), x.grad, testing.full_grads(one)))
    except ValueError as error:
        return str(error)
    return results


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_blocks_get_all_tokens_wherever_hidden_states_are_given(sharded):
    """Keys and values are of all tokens, too, and not of this rank's alone, which no shape says. The plan may leave
    the block whole."""
    ((want, exact),) = run_ranks(attending_on_rank, 1, False, sharded)
    torch.testing.assert_close(want, exact, rtol=1e-3, atol=1e-4)
    for got, _ in run_ranks(attending_on_rank, 4, True, sharded):
        assert_bitwise_equal(got, want)
    ((off, _),) = run_ranks(attending_on_rank, 1, False, sharded, "", False)
    for got, _ in run_ranks(attending_on_rank, 4, True, sharded, "", False):
        assert any(not torch.equal(grad, off[2][name]) for name, grad in got[2].items())


@pytest.mark.parametrize(
    ("sharded", "case", "text"),
    [
        (
            False,
            "another",
            r"layers\.0\.attentions\.0\.k\.weight: the same on every rank, and meets this rank's part",
        ),
        (True, "another", "this rank's part of the activations: taken as the same on every rank"),
        (False, "flat", r"Attends got all tokens .* \(2, 8, 64\).* is of shape \(16, 64\)"),
        (False, "by name", "Attends is whole on every rank.* it got a NoneType"),
        (False, "inner", r"layers\.0\.attentions\.0\.o\.weight: the same on every rank, and meets this rank's part"),
    ],
)
def test_blocks_that_do_not_get_all_tokens_are_refused(sharded, case, text):
    """Where tokens are not sharded they work."""
    ((want, exact),) = run_ranks(attending_on_rank, 1, False, sharded, case)
    torch.testing.assert_close(want[0], exact[0], rtol=1e-3, atol=1e-4)
    for error in run_ranks(attending_on_rank, 2, True, sharded, case):
        assert isinstance(error, str) and re.search(text, error), error


def twice_normed(dtype=torch.float32):
    """Whose norm has a weight and is used before the layers, too."""
    import transformers

    torch.manual_seed(0)
    model = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**hf_models.SIZES))
    model.model.norm = nn.RMSNorm(64, eps=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def twice_normed_on_rank(tp_group, sequence_parallel):
    model = parallelize(twice_normed(), tp_group, sequence_parallel=sequence_parallel)
    with tpi.set_tp_invariant_mode(True):
        fails = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):  # in the middle of the layers, which leaves nothing behind
            model(**hf_models.batch())
        fails.remove()
        output = model(**hf_models.batch())
        output.loss.backward()
    return output.logits.detach(), testing.full_grads(model)


def test_a_norm_before_and_after_the_layers():
    ((logits, grads),) = run_ranks(twice_normed_on_rank, 1, False)
    for got in run_ranks(twice_normed_on_rank, 2, True):
        assert_bitwise_equal(got, (logits, grads))
    model = twice_normed(torch.float64)
    model(**hf_models.batch()).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name].double(), parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


# --- plain modules, plans of one's own ------------------------------------------------------------------------------


class Attention(nn.Module):
    """Calls F.scaled_dot_product_attention as anybody would; four heads of its width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def plain() -> nn.Module:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return nn.Sequential(nn.Embedding(96, 64), Attention(), mlp, nn.Linear(64, 10))


PLAIN_PLAN = {
    "0": "embedding_rowwise",
    "1.qkv": Part("colwise", partition_stride=3),
    "1.out": "rowwise",
    "*.1": "colwise",
    "2.3": "rowwise",
}


def plain_case(tp_group):
    model = parallelize(plain(), tp_group, PLAIN_PLAN)
    y = model(torch.arange(90).view(2, 45))
    y.square().sum().backward()
    return y, testing.full_grads(model)


def test_plain_modules():
    results = testing.assert_tp_invariant(plain_case, degrees=(1, 2, 4), device="cpu")
    model = plain()
    y = model(torch.arange(90).view(2, 45))
    y.square().sum().backward()
    torch.testing.assert_close(next(iter(results.values())), y.detach(), rtol=1e-4, atol=1e-5)
    for (name, parameter), value in zip(model.named_parameters(), list(results.values())[1:], strict=True):
        torch.testing.assert_close(value, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_what_no_pattern_covers_stays_whole_on_invariant_kernels():
    calls = []

    def spy(a, b, *, bias=None, out_dtype=None):
        calls.append(tuple(b.shape))
        return reference.matmul(a, b, bias=bias, out_dtype=out_dtype)

    model = parallelize(plain(), None, PLAIN_PLAN, gemm_fn=spy)
    with tpi.set_tp_invariant_mode(True):
        model(torch.arange(6).view(2, 3))
        calls.clear()  # those of a first call's check
        model(torch.arange(6).view(2, 3))
    assert calls == [(64, 192), (64, 64), (64, 256), (256, 64), (64, 10)]
    assert [type(m).__name__ for m in model[2]] == ["LayerNorm", "Linear", "GELU", "Linear"]


# --- the example ----------------------------------------------------------------------------------------------------


def example_on_rank(tp_group, mode):
    digests = []
    for make in (swap_linear.constructed, swap_linear.swapped):
        torch.manual_seed(0)
        with tpi.set_tp_invariant_mode(mode):
            digests.append(swap_linear.train(make(tp_group, "cpu"), tp_group, "cpu"))
    return digests


def test_the_example():
    """Under torchrun, and on ranks here."""
    (expected,) = run_ranks(example_on_rank, 1, True)
    assert expected[0] == expected[1]
    assert run_ranks(example_on_rank, 4, True) == [expected] * 4
    assert run_ranks(example_on_rank, 4, False)[0] != run_ranks(example_on_rank, 1, False)[0]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "TP_INVARIANT_MODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*torchrun, swap_linear.__file__], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["constructed", expected[0], "swapped", expected[0]]


def sharded_logits(tp_group):
    model = hf_models.build("qwen3")
    model = parallelize(model, tp_group, {**own_plan(model), "lm_head": "colwise"})
    output = model(**hf_models.batch())
    output.loss.backward()
    return output.loss.detach(), tpi.testing.full_grads(model), output.logits.shape[-1]


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_the_loss_of_logits_left_sharded(mode):
    """With an output layer that gathers nothing, the model's own loss is the one of whole logits."""
    with tpi.set_tp_invariant_mode(mode):
        whole = parallelize(hf_models.build("qwen3"), None)
        output = whole(**hf_models.batch())
        output.loss.backward()
        for loss, grads, width in run_ranks(sharded_logits, 2):
            assert width == hf_models.VOCABULARY // 2
            if mode:
                assert_bitwise_equal((loss, grads), (output.loss.detach(), tpi.testing.full_grads(whole)))
            torch.testing.assert_close(loss, output.loss.detach())
