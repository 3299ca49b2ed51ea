"""Transformer Engine's names: its signatures, what is refused, the bits of TP=1, values and state dicts.

The signatures are those of transformer_engine/pytorch/module/linear.py, layernorm_linear.py and layernorm_mlp.py in
NVIDIA/TransformerEngine, version 2.20, commit d0067d0da6cb01811b8072a7d304f0e00344ce2b.
"""

from __future__ import annotations

import inspect
import io
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

import tp_invariant as tpi
import tp_invariant.integrations.transformer_engine as te
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.core.layout import shard
from tp_invariant.testing import assert_bitwise_equal

NEEDED = inspect.Parameter.empty
COMMON = dict(
    sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None
)  # fmt: skip
LAST = dict(ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None)
UB = dict(ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False)
SIGNATURES = {
    "Linear": dict(
        in_features=NEEDED, out_features=NEEDED, **COMMON, rng_tracker_name=None, init_method=None, bias=True,
        return_bias=False, params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", **UB,
        ub_bulk_dgrad=False, ub_bulk_wgrad=False, **LAST, save_original_input=False, name=None,
    ),
    "LayerNormLinear": dict(
        in_features=NEEDED, out_features=NEEDED, eps=1e-5, **COMMON, init_method=None, bias=True,
        normalization="LayerNorm", return_bias=False, params_dtype=None, parallel_mode=None,
        return_layernorm_output=False, return_layernorm_output_gathered=False, parameters_split=None,
        zero_centered_gamma=False, device="cuda", **UB, ub_bulk_wgrad=False, ub_bulk_dgrad=False, **LAST, name=None,
    ),
    "LayerNormMLP": dict(
        hidden_size=NEEDED, ffn_hidden_size=NEEDED, eps=1e-5, sequence_parallel=False, return_bias=False,
        get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
        activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
        params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
        micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False,
        name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False,
    ),
}  # fmt: skip
FP8 = dict(fp8_output=False, fp8_grad=False)
FORWARDS = {name: dict(inp=NEEDED, is_first_microbatch=None, **FP8) for name in ("Linear", "LayerNormLinear")}
FORWARDS["LayerNormMLP"] = dict(inp=NEEDED, is_first_microbatch=None)


@pytest.mark.parametrize(("name", "count"), [("Linear", 25), ("LayerNormLinear", 28), ("LayerNormMLP", 32)])
def test_signatures(name, count):
    """Names, order and defaults; each argument is in the documents' table."""
    cls = getattr(te, name)
    page = Path(__file__).parents[2].joinpath("docs/transformer_engine.md").read_text()
    for method, wanted in ((cls, SIGNATURES[name]), (cls.forward, FORWARDS[name])):
        found = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
        assert [(p.name, p.default) for p in found if p.kind != p.KEYWORD_ONLY] == list(wanted.items())
        assert {p.name for p in found if p.kind == p.KEYWORD_ONLY} <= {"gemm_fn"}
        assert all(f"`{argument}`" in page for argument in wanted)
    assert len(SIGNATURES[name]) == count


@pytest.mark.parametrize("argument", sorted(te.REFUSED))
def test_refused_by_name(argument):
    """Each with its advice, by all classes that have it."""
    value = {"parameters_split": ("q", "k"), "symmetric_ar_type": "one_shot", "activation_params": {"limit": 7.0}}
    text = rf"^{argument}=.* of \w+ on rank 0 is not supported\. (Leave|Make)"
    for name in SIGNATURES:
        options = {argument: value.get(argument, True)}
        if argument in SIGNATURES[name]:
            with pytest.raises(ValueError, match=text):
                getattr(te, name)(8, 8, device="cpu", **options)
        if argument in FORWARDS[name]:
            with pytest.raises(ValueError, match=text):
                getattr(te, name)(8, 8, device="cpu")(torch.ones(2, 8), **options)


def test_other_refusals():
    for options, text in (
        (dict(activation="qgelu"), "activation='qgelu' .* choose one of gelu, silu, relu, srelu, geglu, swiglu, reglu"),
        (dict(tp_size=2), "tp_size=2 of LayerNormMLP on rank 0 is not the size of tp_group, 1: give tp_group"),
        (dict(normalization="None"), "normalization='None' is unknown"),
    ):
        with pytest.raises(ValueError, match=text):
            te.LayerNormMLP(8, 8, device="cpu", **options)
    with pytest.raises(ValueError, match="parallel_mode='row' is impossible for LayerNormLinear"):
        te.LayerNormLinear(8, 8, parallel_mode="row", device="cpu")


def test_positions_and_defaults():
    """The third argument of Linear is sequence_parallel, the fourth of LayerNormLinear too; tp_invariant's are bias."""
    assert te.Linear(8, 8, True, device="cpu").sequence_parallel and tpi.Linear(8, 8, True).bias is not None
    layer = te.LayerNormLinear(256, 512, 1e-5, True, zero_centered_gamma=True, device="cpu")
    assert layer.sequence_parallel and not layer.bias.any() and not layer.layer_norm_weight.any()
    assert abs(layer.weight.std().item() - 0.023) < 1e-3
    mlp = te.LayerNormMLP(256, 64, init_method=torch.nn.init.ones_, device="meta").to_empty(device="cpu")
    mlp.reset_parameters()
    assert (mlp.fc1_weight == 1).all() and (mlp.layer_norm_weight == 1).all() and not mlp.fc2_bias.any()
    assert abs(mlp.fc2_weight.std().item() - 0.023) < 1e-3


# --- bits -----------------------------------------------------------------------------------------------------------

H, FFN, TOKENS = 48, 96, (8, 3)


def results(tp_group, sequence_parallel, activation, enabled, dtype=torch.float32):
    """y, dx and all gradients, whole, of a LayerNormMLP, and of a LayerNormLinear and a Linear after it."""
    group = resolve_group(tp_group)
    sharded = sequence_parallel and group.size > 1
    torch.manual_seed(3)
    whole_x, whole_dy = torch.randn(*TOKENS, H).to(dtype), torch.randn(*TOKENS, H).to(dtype)
    mine = [shard(t, dim=0, rank=group.rank, world=group.size) if sharded else t for t in (whole_x, whole_dy)]
    options = dict(
        sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=group.size, params_dtype=dtype, device="cpu",
        init_method=torch.nn.init.normal_, get_rng_state_tracker=lambda: 1 / 0,
    )  # fmt: skip
    got = {}
    with tpi.set_tp_invariant_mode(enabled):
        mlp = te.LayerNormMLP(H, FFN, activation=activation, set_parallel_mode=True, **options)
        fc1 = te.LayerNormLinear(H, FFN, normalization="RMSNorm", parallel_mode="column", return_bias=True, **options)
        fc2 = te.Linear(FFN, H, parallel_mode="row", **options)

        def pair(x):
            hidden, bias = fc1(x, is_first_microbatch=True)
            return fc2(F.relu(hidden + bias), None)

        for name, call, layers in (("mlp", mlp, [mlp]), ("pair", pair, [fc1, fc2])):
            x = mine[0].clone().requires_grad_()
            y = call(x)
            y.backward(mine[1])
            for key, value in (("y", y.detach()), ("dx", x.grad)):
                got[f"{name} {key}"] = gather_dim(value, 0, group) if sharded else value
            for i, layer in enumerate(layers):
                got |= {f"{name} {i} d {key}": grad for key, grad in tpi.testing.full_grads(layer).items()}
        norm = tpi.clip_grad_norm_([p for layer in (mlp, fc1, fc2) for p in layer.parameters()], 1.0)
        got["norm"] = norm if enabled else torch.zeros(())
        got |= {f"state {key}": value for key, value in tpi.full_state_dict(mlp).items()}
    return got


def all_results(tp_group, cases):
    return [results(tp_group, *case) for case in cases]


CASES = [
    (sp, activation, True, dtype)
    for (sp, activation), dtype in zip(
        itertools.product((False, True), ("swiglu", "geglu", "gelu")), (torch.float32, torch.bfloat16) * 3, strict=True
    )
]


@pytest.mark.parametrize("degree", (2, 4))
def test_the_bits_of_one_rank(degree):
    """With sequence parallelism and without, in two dtypes; with the mode off outputs and gradients differ."""
    controls = [(sp, "swiglu", False) for sp in (False, True)]
    for every in run_ranks(all_results, degree, CASES + controls):
        for case, got in zip(CASES, every, strict=False):
            assert_bitwise_equal(got, results(None, *case))
        for case, got in zip(controls, every[len(CASES) :], strict=True):
            want = results(None, *case)
            assert got.keys() == want.keys()
            for name in ("mlp y", "mlp dx", "pair y", "pair dx"):
                assert not torch.equal(got[name], want[name]), name
                torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-3)


ACTIVATIONS = {  # of the first half of what FC1 computes, where it is gated: that is gate, the second half is up
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "srelu": lambda h: F.relu(h) ** 2,
    "geglu": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1],
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "reglu": lambda h: F.relu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("zero_centered", (False, True))
def test_values(activation, zero_centered):
    """Against plain torch in float64, with all that forward can return."""
    options = dict(activation=activation, zero_centered_gamma=zero_centered, return_bias=True, device="cpu")
    mlp = te.LayerNormMLP(H, FFN, init_method=torch.nn.init.normal_, return_layernorm_output=True, **options)
    for parameter in (mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.fc1_bias, mlp.fc2_bias):
        torch.nn.init.normal_(parameter)
    x, dy = torch.randn(*TOKENS, H, requires_grad=True), torch.randn(*TOKENS, H)
    with tpi.set_tp_invariant_mode(True):
        y, bias, normed = mlp(x)
        (y + bias).backward(dy)
    p = {name: q.detach().double().requires_grad_() for name, q in mlp.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    want_normed = F.layer_norm(wide_x, (H,), p["layer_norm_weight"] + zero_centered, p["layer_norm_bias"])
    hidden = ACTIVATIONS[activation](F.linear(want_normed, p["fc1_weight"], p["fc1_bias"]))
    want = F.linear(hidden, p["fc2_weight"], p["fc2_bias"])
    want.backward(dy.double())
    pairs = [(y + bias, want), (normed, want_normed), (x.grad, wide_x.grad)]
    pairs += [(q.grad, p[name].grad) for name, q in mlp.named_parameters()]
    for got, wanted in pairs:
        assert (got.double() - wanted).norm() <= 2e-6 * wanted.norm()


# --- state dicts and main_grad --------------------------------------------------------------------------------------


def loaded(tp_group, state):
    mlp = te.LayerNormMLP(
        H, FFN, activation="swiglu", set_parallel_mode=True, bias=False, tp_group=tp_group, device="cpu"
    )
    tpi.load_full_state_dict(mlp, state)
    rows = mlp.fc1_weight.detach().clone()
    with pytest.raises(ValueError, match=r"set_tensor_parallel_group of LayerNormMLP on rank . got another group"):
        mlp.set_tensor_parallel_group(None)
    mlp.set_tensor_parallel_group(tp_group)
    with pytest.raises(ValueError, match=r"set_parallel_mode=False of LayerNormMLP on rank . goes with one rank"):
        te.LayerNormMLP(H, FFN, tp_group=tp_group, device="cpu")
    return rows, tpi.full_state_dict(mlp)


def test_a_whole_state_dict_on_two_ranks():
    """fc1 is [gate; up], and a rank has rows of both; what goes in comes out."""
    shapes = {"layer_norm_weight": (H,), "layer_norm_bias": (H,), "fc1_weight": (2 * FFN, H), "fc2_weight": (H, FFN)}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    state["_extra_state"] = torch.empty(0, dtype=torch.uint8)
    gate, up = state["fc1_weight"].chunk(2)
    for rank, (rows, full) in enumerate(run_ranks(loaded, 2, state)):
        assert_bitwise_equal(rows, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
        assert_bitwise_equal(full, state)


def test_extra_state():
    """Empty, None or not there it is nothing; fp8 state is refused, without unpickling it."""
    model = torch.nn.Sequential(te.LayerNormLinear(8, 8, device="cpu"))
    state = model.state_dict()
    shapes = {"weight": (8, 8), "bias": (8,), "layer_norm_weight": (8,), "layer_norm_bias": (8,), "_extra_state": (0,)}
    assert {key: tuple(value.shape) for key, value in state.items()} == {f"0.{n}": s for n, s in shapes.items()}
    for extra in (torch.empty(0, dtype=torch.uint8), None, io.BytesIO()):
        model.load_state_dict({**state, "0._extra_state": extra})
    model.load_state_dict({key: value for key, value in state.items() if key != "0._extra_state"})
    for extra in (torch.zeros(9, dtype=torch.uint8), io.BytesIO(bytes(9))):
        with pytest.raises(ValueError, match=r"_extra_state of LayerNormLinear on rank 0 holds fp8 state \(9 bytes\)"):
            model.load_state_dict({**state, "0._extra_state": extra})


def test_main_grad():
    """Added to, and begun anew by the first micro-batch."""
    mlp = te.LayerNormMLP(8, 16, activation="swiglu", fuse_wgrad_accumulation=True, device="cpu")
    for weight in (mlp.fc1_weight, mlp.fc2_weight):
        weight.main_grad = torch.full(weight.shape, 7.0)
    x, sums = torch.randn(5, 8), []
    with tpi.set_tp_invariant_mode(True):
        for first in (True, False, True):
            mlp(x, is_first_microbatch=first).sum().backward()
            sums.append([weight.main_grad.clone() for weight in (mlp.fc1_weight, mlp.fc2_weight)])
    assert mlp.fc1_weight.grad is None and sums[0][0].any()
    assert_bitwise_equal(sums[2], sums[0])
    assert_bitwise_equal(sums[1], [2 * grad for grad in sums[0]])


def test_parameters_that_are_replaced():
    """The layers inside compute with the module's parameters of the moment; compiled code does too."""
    mlp = te.LayerNormMLP(8, 16, activation="swiglu", device="cpu")
    x = torch.randn(5, 8)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        before = mlp(x)
        zeros = {"fc2_weight": torch.zeros_like(mlp.fc2_weight)}
        assert not torch.func.functional_call(mlp, zeros, (x,)).any()
        assert_bitwise_equal(mlp(x), before)
        mlp.fc2_weight = torch.nn.Parameter(zeros["fc2_weight"])
        assert not mlp(x).any() and mlp._linears[1].weight is mlp.fc2_weight
    assert [name for name, _ in mlp.named_modules()] == [""]
