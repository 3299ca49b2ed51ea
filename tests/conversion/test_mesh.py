"""parallelize(mesh=..): one digest at every layout of dp, cp and tp, with and without sequence parallelism."""

import copy
import functools
import itertools
import math

import hf_models
import pytest
import torch
import torch.nn.functional as F
from cases import more
from error_texts import refused
from meshes import init_device_mesh
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.data_parallel import MicroBatchTree
from tp_invariant.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("mode_on")
MICRO_BATCHES, BATCH, LENGTH, CHUNKS, VOCABULARY, HIDDEN, HEADS, KEYS, SIZE = (
    4,
    2,
    32,
    4,
    hf_models.VOCABULARY,
    64,
    8,
    4,
    8,
)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class Attention(nn.Module):
    """Grouped queries, rotary embedding, and torch's attention, which parallelize replaces."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * SIZE)
        self.k_proj = nn.Linear(HIDDEN, KEYS * SIZE)
        self.v_proj = nn.Linear(HIDDEN, KEYS * SIZE)
        self.o_proj = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)

    def forward(self, hidden_states, cos, sin):
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(HIDDEN, 128, bias=False)
        self.down_proj = nn.Linear(128, HIDDEN)

    def forward(self, hidden_states):
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.RMSNorm(HIDDEN), Attention(), nn.RMSNorm(HIDDEN), Mlp()

    def forward(self, hidden_states, cos, sin):
        x = hidden_states + self.attn(self.norm1(hidden_states), cos, sin)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, position_ids):
        angles = position_ids[:, :, None] / 100 ** (torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


PLAN = {
    "embed": "embedding_rowwise", "head": "colwise_gather_output", "layers.*.attn.o_proj": "rowwise",
    "layers.*.mlp.down_proj": "rowwise", **{f"layers.*.attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise",
}  # fmt: skip


DIMS = "dp", "cp", "tp"


def build(kind, **options):
    if kind != "own":
        return hf_models.build(kind, **options)
    torch.manual_seed(0)
    model = Decoder()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.exp2(torch.randint(-2, 3, p.shape).float()))
    return model


def logits_of(model, ids, positions):
    output = model(input_ids=ids, position_ids=positions)
    return output if isinstance(output, torch.Tensor) else output.logits


def micro_batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def losses_of(logits, targets):
    return tpi.vocab_parallel_cross_entropy(logits, targets, tp_group=None, reduction="none")


def trained(tp_group, layout, settings):
    return train(layout, everyone=tp_group, **settings)


def train(
    layout, kind="own", chunks=CHUNKS, steps=(0, 1), sp=False, recompute=False, positions=False, dtype=torch.float32,
    verify=False, dims=DIMS, everyone=None, load=None, save=None,
):  # fmt: skip
    """layout: (dp, cp, tp). Logits and losses of micro-batch 0, and full gradients, norms and parameters."""
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=dims)
    cp = mesh["cp"] if "cp" in dims else None
    model = build(kind).to(dtype)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=recompute == "reentrant"))
    plan = PLAN if kind == "own" else None
    model = tpi.parallelize(model, plan=plan, mesh=mesh, sequence_chunks=chunks, sequence_parallel=sp, verify=verify)
    tree = MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=MICRO_BATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    if load is not None:
        tpi.checkpoint.load(load, model, optimizer, group=everyone)
    for step in steps:
        for i in tree.share:
            ids, targets = (tpi.sequence_part(x, cp) for x in micro_batch(step, i))
            places = tpi.sequence_part(torch.arange(LENGTH)[None], cp) if kind == "own" or positions else None
            logits = logits_of(model, ids, places)
            losses = tpi.regions.gather_sequence(losses_of(logits, targets), cp, 1)
            losses.sum().backward()
            tree.add(count=losses.numel())
            if i == 0:
                found[f"logits {step}"] = tpi.regions.gather_sequence(logits.detach(), cp, 1)
                found[f"losses {step}"] = losses.detach()
        tree.reduce()
        found[f"grads {step}"] = tpi.testing.full_grads(model)
        found[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found[f"parameters {step}"] = tpi.testing.full_parameters(model)
    if save is not None:
        tpi.checkpoint.save(save, model, optimizer, group=everyone)
    return found


def run(layout, **settings):
    return run_ranks(trained, math.prod(layout), layout, settings)


@functools.cache
def alone(**settings):
    return run((1, 1, 1), **settings)[0]


def same(layout, expected, **settings):
    """Ranks that do not have micro-batch 0 have no logits."""
    ranks = run(layout, **settings)
    for rank, found in enumerate(ranks):
        assert_bitwise_equal(found, {name: expected[name] for name in found}, f"{layout}, {settings}, rank {rank}")
    assert ranks[0].keys() == {name for name in expected if int(name[-1]) in settings.get("steps", (0, 1))}


LAYOUTS = [(1, 4, 1), (1, 1, 4), (2, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
KINDS = [("qwen3", (1, 4, 1)), ("qwen3_moe", (1, 2, 2)), ("gpt_oss", (2, 2, 1))]


def pytest_generate_tests(metafunc):
    """A few of the layouts; all of them with --all-cases."""
    whole = metafunc.config.getoption("--all-cases")
    if metafunc.function is test_own_decoder:
        metafunc.parametrize("layout", LAYOUTS if whole else LAYOUTS[-1:], ids=str)
    elif metafunc.function is test_hugging_face:
        every = itertools.product(("qwen3", "qwen3_moe", "gpt_oss"), [(1, 4, 1), (1, 2, 2), (2, 2, 1)])
        metafunc.parametrize(("kind", "layout"), every if whole else KINDS, ids=str)


def test_own_decoder(layout):
    for sp in {False, layout[2] > 1}:
        same(layout, alone(), sp=sp)


def test_hugging_face(kind, layout):
    """Tied embeddings and norms of heads; a mixture of experts; sinks, windows and biases."""
    same(layout, alone(kind=kind), kind=kind, sp=layout[2] > 1)


@pytest.mark.parametrize("dims", [("dp", "cp"), more(("cp",)), more(("tp",)), ("cp", "tp")], ids=str)
def test_dims_that_are_missing(dims):
    """Without "tp" parameters are plain tensors."""
    same((2,) * len(dims), alone(kind="qwen3"), kind="qwen3", dims=dims, steps=(0,))


def test_a_router_that_views_its_input():
    """A chunk of several rows is no view of them all."""
    model, ids = hf_models.build("glm4_moe"), torch.arange(16).reshape(2, 8) + 3
    expected = tpi.parallelize(copy.deepcopy(model), None)(ids).logits
    got = tpi.parallelize(model, None, sequence_chunks=2)(ids).logits
    got.sum().backward()
    assert_bitwise_equal(got.detach(), expected.detach())


def test_stop_at_one_layout_and_go_on_at_another(tmp_path):
    folder = str(tmp_path / "checkpoint")
    run((1, 2, 2), steps=(0,), save=folder, sp=True)
    for rank, found in enumerate(run((2, 2, 1), steps=(1,), load=folder)):
        assert_bitwise_equal(found, {name: alone()[name] for name in found}, f"rank {rank}")


def test_verify():
    same((1, 2, 2), alone(kind="qwen3"), kind="qwen3", verify=True, sp=True, steps=(0,))


def test_bfloat16():
    """Each chunk's gradient is rounded."""
    options = dict(kind="qwen3", dtype=torch.bfloat16)
    same((1, 2, 2), alone(**options), **options)


@pytest.mark.parametrize("recompute", [more("reentrant"), "not reentrant"])
def test_activation_checkpointing(recompute):
    """The positions are given, too."""
    same((1, 2, 2), alone(kind="qwen3"), kind="qwen3", sp=True, recompute=recompute, positions=True, steps=(0,))


@pytest.mark.parametrize("kind", ["own", "qwen3"])
def test_values_and_controls(kind):
    """Another number of chunks has other bits, as has the mode off, and all have the values of stock torch."""
    cut, whole = alone(kind=kind), alone(kind=kind, chunks=1)
    with tpi.set_tp_invariant_mode(False):
        off = run((1, 4, 1), kind=kind)[0]
        assert tpi.testing.digest(off["grads 0"]) != tpi.testing.digest(run((1, 1, 1), kind=kind)[0]["grads 0"])
        model = build(kind).double()
        for i in range(MICRO_BATCHES):
            ids, targets = micro_batch(0, i)
            logits = logits_of(model, ids, torch.arange(LENGTH)[None])
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    assert_bitwise_equal(whole["logits 0"], cut["logits 0"])
    for name, p in model.named_parameters():
        assert tpi.testing.digest(whole["grads 0"][name]) != tpi.testing.digest(cut["grads 0"][name])
        expected = p.grad / (MICRO_BATCHES * BATCH * LENGTH)
        for found in (whole, cut, off):
            assert (found["grads 0"][name] - expected).norm() < 1e-5 * expected.norm(), name


# --- what is refused --------------------------------------------------------------------------------------------------


def refusals(tp_group):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    texts = {}

    def call(model, mesh=mesh, chunks=2, **options):
        return tpi.parallelize(model, mesh=mesh, sequence_chunks=chunks, **options)

    texts["chunks"] = refused(ValueError, lambda: call(build("qwen3"), chunks=3))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    texts["ep"] = refused(ValueError, lambda: call(build("qwen3"), other))
    texts["both"] = refused(ValueError, lambda: call(build("qwen3"), tp_group=mesh["tp"]))
    texts["kind"] = refused(TypeError, lambda: call(build("qwen3"), mesh=4))
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    texts["rope"] = refused(ValueError, lambda: call(build("qwen3", rope_parameters=rope)))
    model = build("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += mesh["cp"].get_local_rank() * mesh["tp"].get_local_rank()
    texts["weights"] = refused(RuntimeError, lambda: call(model))
    model = build("qwen3")
    model.gain = nn.Parameter(torch.ones(1))
    texts["beside"] = refused(ValueError, lambda: call(model))
    model, ids = call(build("qwen3_moe")), torch.ones(1, 8, dtype=torch.int64)
    arguments = dict(labels=ids, use_cache=True, output_router_logits=True, attention_mask=ids * 0)
    for name, value in arguments.items():
        texts[name] = refused(ValueError, lambda name=name, value=value: model(ids, **{name: value}))
    with torch.no_grad():
        model(ids, attention_mask=ids)
    model = call(build("qwen3"), chunks=4, sequence_parallel=True)
    tokens = torch.arange(16)[None]  # whole on every rank
    texts["whole"] = refused(RuntimeError, lambda: model(tokens))
    model(tpi.sequence_part(tokens, mesh["cp"])).logits.sum().backward()
    texts["clip"] = refused(RuntimeError, lambda: tpi.clip_grad_norm_(model.parameters(), 1.0))
    dropout = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Dropout(), nn.Linear(HIDDEN, HIDDEN))
    dropout = call(dropout, plan={})
    texts["dropout"] = refused(ValueError, lambda: dropout(ids))
    assert dropout.eval()(ids).requires_grad
    texts["parts of chunks"] = refused(ValueError, lambda: model(ids[:, :6]))
    return texts


def test_what_is_refused():
    expected = dict(
        whole="the model's input is the same on rank 0, 1 of cp_group, each of which must pass another part",
        clip="clip_grad_norm_ has the gradient of model.embed_tokens.weight",
        dropout="dropout on rank {cp} of 2 of cp_group acts on this rank's part of the tokens",
        chunks="sequence_chunks=3 on rank {cp} of cp_group must be a positive multiple of the",
        ep="mesh has the dims ep: known are pp, dp, cp, tp. Leave it out, and give expert_parallel_group=",
        both="tp_group were both given",
        kind="mesh=4 is a int: pass a DeviceMesh",
        rope="cp=2: model.rotary_emb has rope_type='dynamic', which goes by the positions of a rank",
        weights="hold different weights in 1 of 24 parameters",
        beside="Qwen3ForCausalLM, a Qwen3ForCausalLM: has gain itself and modules with parameters inside",
        labels="Qwen3MoeForCausalLM on rank {cp} of 2 of cp_group is given labels, whose shift needs the next rank's",
        use_cache="is given use_cache: a rank would have the keys of its own tokens",
        output_router_logits="is given output_router_logits=True, whose aux_loss would be of this rank's tokens",
        attention_mask="is given an attention_mask with padding",
        **{"parts of chunks": "6 tokens of each sequence in 2 chunks (sequence_chunks), each of which"},
    )
    for rank, texts in enumerate(run_ranks(refusals, 4)):
        for name, text in expected.items():
            assert text.format(cp=rank // 2) in texts[name], texts[name]
