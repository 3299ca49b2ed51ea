"""What a plan gets silently wrong: named by the first forward with gradients, and by parallelize(.., verify=True)."""

from __future__ import annotations

import copy
import types
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group, resolve_group
from tp_invariant.conversion.gradient_flow import FirstForward, IncompleteGradient

HIDDEN, HEADS, HEAD = 16, 4, 4


class Gain(nn.Module):
    """One learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Attention(nn.Module):
    """With q, k and v fused or not, and what may stand in the sharded region."""

    def __init__(self, *, fused=False, norm=None, gain=None, scale=False, position=False, latent=False) -> None:
        super().__init__()
        if fused:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        else:
            self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.gain = norm, gain
        if scale:
            self.scale = nn.Parameter(torch.tensor(0.8))
        if latent:
            self.latent = nn.Linear(HIDDEN, HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(-1, (-1, HEAD)) for t in (q, k, v))
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        if hasattr(self, "scale"):
            q = q * self.scale
        if hasattr(self, "latent"):  # of all heads alike
            k = k + self.latent(x).unsqueeze(-2)
        y = F.scaled_dot_product_attention(*(t.transpose(-3, -2) for t in (q, k, v)), is_causal=True)
        y = y.transpose(-3, -2).flatten(-2)
        return self.o(y if self.gain is None else self.gain(y))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, between: nn.Module | None = None) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), attention
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 32), between or nn.GELU(), nn.Linear(32, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, tied=False) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(24, HIDDEN), nn.ModuleList(blocks), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN: dict[str, Any] = {
    **{f"blocks.*.attn.{name}": "colwise" for name in "qkv"}, "blocks.*.attn.o": "rowwise",
    "blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise", "head": "colwise_gather_output",
}  # fmt: skip
FUSED = {name: style for name, style in PLAN.items() if name[-2:] not in (".q", ".k", ".v")}
HEADS_PART = tpi.Part("replicated_with_grad_allreduce", heads=HEADS, heads_dim=2)


class Both(nn.Module):
    """A mean over the features of which each rank has a part; forward alone is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y - y.mean(-1, keepdim=True))


def models(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """By name, a model and a plan of it: wrong ones, and right ones beside them."""
    torch.manual_seed(0)
    ids = "replicate"
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "fused": (lambda: Model(Block(Attention(fused=True))), {**FUSED, "blocks.*.attn.qkv": "colwise"}),
        "fused right": (
            lambda: Model(Block(Attention(fused=True)), tied=True),
            {**FUSED, "blocks.*.attn.qkv": tpi.Part("colwise", sizes=(HIDDEN,) * 3)},
        ),
        "norm": (lambda: Model(Block(Attention(norm=nn.RMSNorm(HEAD)))), {**PLAN, "blocks.*.attn.norm": ids}),
        "norm right": (
            lambda: Model(Block(Attention(norm=nn.RMSNorm(HEAD))), Block(Attention(norm=nn.LayerNorm(HEAD)))),
            {**PLAN, "blocks.*.attn.norm": HEADS_PART, "head": "colwise"},
        ),
        "gain": (lambda: Model(Block(Attention(gain=Gain()))), {**PLAN, "blocks.*.attn.gain": ids}),
        "gain right": (
            lambda: Model(Block(Attention(gain=Gain()))),
            {
                **PLAN,
                "blocks.*.attn.gain": ids,
                "blocks.*.attn.o": "replicate",
                **{f"blocks.*.attn.{n}": "colwise_gather_output" for n in "qkv"},
            },
        ),
        "scale": (lambda: Model(Block(Attention(scale=True))), {**PLAN, "blocks.*.attn": ids}),
        "latent": (lambda: Model(Block(Attention(latent=True))), {**PLAN, "blocks.*.attn.latent": ids}),
        "mean": (lambda: nn.Sequential(Both()), {"0.up": "colwise", "0.down": "rowwise"}),
        "whole": (lambda: Model(Block(Attention()), Block(Attention(), nn.SiLU()), tied=True), PLAN),
    }
    make, plan = made[name]
    return make().double().float(), plan


def example(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if isinstance(model, Model):
        return torch.randint(24, (2, 6), generator=generator)
    return torch.randn(5, HIDDEN, generator=generator)


def checks(model: nn.Module) -> list[Any]:
    return [hook for hook in model._forward_hooks.values() if isinstance(hook, FirstForward)]


# --- the graph of a forward -----------------------------------------------------------------------------------------


def first_forwards(tp_group, names, mode):
    """By name, what the first forward with gradients says: "" for nothing."""
    found = {}
    with tpi.set_tp_invariant_mode(mode):
        for name in names:
            model, plan = models(name)
            tpi.parallelize(model, tp_group, plan)
            with torch.no_grad():
                model(example(model))  # no gradients, so nothing to say
            try:
                model(example(model)).sum().backward()
                found[name] = ""
            except IncompleteGradient as error:
                found[name] = str(error)
            if not found[name]:
                assert not checks(model), "the check goes away after it was done"
    return found


WRONG = {
    "norm": "blocks.0.attn.norm.weight: the same on every rank, and meets this rank's part",
    "gain": "blocks.0.attn.gain.gain: the same on every rank",
    "scale": "blocks.0.attn.scale: the same on every rank",
    "latent": "an activation, made of blocks.0.attn.latent",
}
RIGHT = ("fused right", "norm right", "gain right", "whole")


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_the_first_forward_names_what_gets_a_part_of_its_gradient(mode):
    for got in run_ranks(first_forwards, 2, (*WRONG, *RIGHT, "mean"), mode):
        for name, text in WRONG.items():
            assert text in got[name], (name, got[name])
        assert [name for name in (*RIGHT, "mean") if got[name]] == []
    assert set(first_forwards(None, (*WRONG, *RIGHT), mode).values()) == {""}, "alone every gradient is complete"


def passing_on_rank(tp_group):
    said = []
    for family, sp, mode, reentrant in (
        ("qwen3", True, True, False),
        ("gemma3", False, False, True),
        ("olmo2", False, True, False),
    ):
        model = tpi.parallelize(hf_models.build(family), tp_group, sequence_parallel=sp)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with tpi.set_tp_invariant_mode(mode):
            model(**hf_models.batch(), use_cache=False).loss.backward()
        said.append(len(checks(model)))
    return said


def test_hugging_face_models_pass():
    assert run_ranks(passing_on_rank, 2) == [[0, 0, 0]] * 2


def test_compiled_code_and_copies_have_the_check_too():
    model = nn.Sequential(nn.Linear(HIDDEN, 4))
    FirstForward(model, Group(None, 0, 2))
    twin = copy.deepcopy(model)
    torch.compile(twin, backend="eager")(example(model)).sum().backward()
    assert len(checks(model)) == len(checks(twin)) == 1, "not while it is compiled"
    twin(example(model))
    assert (len(checks(model)), len(checks(twin))) == (1, 0), "a copy has a check of its own"


def a_part_over_heads(tp_group, mode):
    """What is expanded over this rank's heads is one of them: its gradient would be added to those of other ranks."""
    from tp_invariant.conversion.gradient_flow import check_gradient_flow
    from tp_invariant.hugging_face.shared_keys import SharedKeys

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = tpi.Linear(HIDDEN, 4)
            self.own = tpi.Linear(HIDDEN, 8, parallel_mode="column", tp_group=tp_group)

        def forward(self, x: Tensor, layer: str) -> Tensor:
            return getattr(self, layer)(x).view(1, -1, 1, 4).transpose(1, 2).expand(-1, 3, -1, -1)

    model = Heads()
    SharedKeys(model, resolve_group(tp_group))
    with tpi.set_tp_invariant_mode(mode):
        assert check_gradient_flow(model, model(torch.ones(5, HIDDEN), "shared"))
        with pytest.raises(IncompleteGradient, match="this rank's part of the activations: taken as the same on every"):
            check_gradient_flow(model, model(torch.ones(5, HIDDEN), "own"))


def test_a_part_is_not_expanded_over_heads():
    for mode in (True, False):
        run_ranks(a_part_over_heads, 2, mode)


class OwnCollective(nn.Module):
    """Ends a sharded region by torch's own collective instead of a row-parallel layer."""

    def __init__(self, collective: Any) -> None:
        super().__init__()
        self.up, self.norm, self.collective = nn.Linear(HIDDEN, 2 * HIDDEN), nn.LayerNorm(HIDDEN), collective

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.collective(self.up(x)[..., :HIDDEN]))


def own_collectives_on_rank(tp_group):
    import torch.distributed._functional_collectives as functional
    import torch.distributed.nn.functional as nn_functional

    def gather(x: Tensor) -> Tensor:
        return functional.all_gather_tensor_autograd(x.contiguous(), x.dim() - 1, tp_group)[..., :HIDDEN]

    def reduce(x: Tensor) -> Tensor:
        return nn_functional.all_reduce(x.clone(), group=tp_group)

    said = []
    for collective in (gather, reduce, lambda x: x):
        plan = {"up": "colwise", "norm": "replicate"}
        model = tpi.parallelize(OwnCollective(collective), tp_group, plan)
        try:
            model(torch.ones(3, HIDDEN))
            said.append("")
        except IncompleteGradient as error:
            said.append(str(error))
    return said


@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer names, which older versions of torch do not have
def test_what_torchs_own_collectives_have_moved_is_not_refused():
    for gathered, reduced, control in run_ranks(own_collectives_on_rank, 2):
        assert gathered == reduced == ""
        assert "norm.weight: the same on every rank" in control


def whole_activation_gathered(tp_group):
    """By a layer of one's own that takes what is the same on every rank for this rank's tokens."""
    from tp_invariant.conversion.gradient_flow import check_gradient_flow
    from tp_invariant.functional.regions import gather_sequence, scatter_sequence

    linear = tpi.Linear(HIDDEN, HIDDEN, tp_group=tp_group)
    said = []
    for enter in (lambda x: x, lambda x: scatter_sequence(x, tp_group)):
        part = enter(linear(torch.randn(4, 3, HIDDEN)))
        part.shards_may_be_equal = True  # the ranks' comparison would notice it before
        y = gather_sequence(part, tp_group)
        try:
            said.append(check_gradient_flow(linear, y))
        except IncompleteGradient as error:
            said.append(str(error))
    return said


def test_a_whole_activation_that_is_gathered():
    for whole, right in run_ranks(whole_activation_gathered, 2):
        assert "a whole activation: taken as this rank's part of the tokens in " in whole
        assert right is True


# --- verify=True ----------------------------------------------------------------------------------------------------


def facts_to_compare(model: nn.Module) -> list[Any]:
    """What verify must leave as it was."""
    tensors = {
        n: (t.detach().clone(), t.dtype, getattr(t, "grad", None)) for n, t in model.state_dict(keep_vars=True).items()
    }
    flags = [(m.training, list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()]
    return [tensors, flags, list(map(type, model.modules())), torch.get_rng_state(), torch.is_grad_enabled()]


def same(a: list[Any], b: list[Any]) -> bool:
    tensors = all(torch.equal(x[0], b[0][n][0]) and x[1] == b[0][n][1] and x[2] is b[0][n][2] for n, x in a[0].items())
    return tensors and a[1:3] == b[1:3] and torch.equal(a[3], b[3]) and a[4] == b[4]


def verified(tp_group, names, mode):
    found = {}
    with tpi.set_tp_invariant_mode(mode):
        for name in names:
            model, plan = models(name)
            before = facts_to_compare(model)
            try:
                inputs = (example(model),) if name == "gain" else example(model)
                tpi.parallelize(model, tp_group, plan, verify=True, example_inputs=inputs)
                found[name] = ""
            except ValueError as error:
                found[name] = str(error)
                assert same(before, facts_to_compare(model)), name
            assert torch.equal(before[3], torch.get_rng_state())
            assert all(p.grad is None for p in model.parameters())
    return found


OFF_BY = {
    "fused": "the output of blocks.0.attn.o is off by",
    "norm": "outputs are right; the gradient of blocks.0.attn.norm.weight is off by",
    "gain": "outputs are right; the gradient of blocks.0.attn.gain.gain is off by",
    "scale": "outputs are right; the gradient of blocks.0.attn.scale is off by",
    "latent": "outputs are right; the gradient of blocks.0.attn.latent.weight is off by",
    "mean": "the output of 0.down is off by",
}


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_verify_names_the_first_module_that_is_off(mode):
    results = run_ranks(verified, 2, (*OFF_BY, *RIGHT), mode)
    assert results[0] == results[1], "the same error on every rank"
    for name, text in OFF_BY.items():
        assert text in results[0][name], (name, results[0][name])
        assert "nothing was changed" in results[0][name]
    assert 'tpi.Part("colwise", sizes=(..))' in results[0]["fused"]
    assert WRONG["gain"] in results[0]["gain"]
    assert [(name, results[0][name]) for name in RIGHT if results[0][name]] == []


class Cosh(torch.autograd.Function):
    """A user's own: nothing sees what its backward calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.cosh(x.clamp(-4, 4))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sinh(x.clamp(-4, 4)) * (x.abs() < 4)


class OverTokens(nn.Module):
    """Right values by operators of torch whose bits depend on how many features there are."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.down, self.what = nn.Linear(HIDDEN, 34), nn.Linear(34, HIDDEN), what

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.what == "mean":
            y = y - y.mean((0, 1))
        elif self.what == "softmax":
            y = y.softmax(1) * y
        elif self.what == "function":
            y = Cosh.apply(y)
        elif self.what == "operator":
            y = vars(torch)["ops"].aten.cosh(y.clamp(-4, 4))  # by this name cloudpickle takes it
        return self.down(y)


def bytes_on_rank(tp_group, what, mode, styles):
    x = testing.wide_randn(2, 37, HIDDEN, generator=torch.Generator().manual_seed(0))
    plan = dict(zip(("up", "down"), styles, strict=True))
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(mode):
        try:
            tpi.parallelize(OverTokens(what), tp_group, plan, verify=True, example_inputs=x)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("what", ("mean", "softmax", "function", "operator"))
def test_verify_compares_bytes_with_one_rank(what):
    for text in run_ranks(bytes_on_rank, 2, what, True, ("colwise", "rowwise")):
        assert text.startswith(
            "OverTokens has other bytes by this plan than by the same on one rank; nothing was changed."
        )
        assert (
            "values are right, but the " + ("output of down" if what in ("mean", "operator") else "gradient of ")
            in text
        )
    assert run_ranks(bytes_on_rank, 2, what, True, ("colwise_gather_output", "rowwise_split_input")) == ["", ""]
    assert run_ranks(bytes_on_rank, 2, what, False, ("colwise", "rowwise")) == ["", ""]
    assert run_ranks(bytes_on_rank, 2, "nothing", True, ("colwise", "rowwise")) == ["", ""]


class Shifting(nn.Module):
    """A decoder layer whose own code hands each token a part of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Sequential(nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Shifting(), Shifting()]), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def mixed_tokens_on_rank(tp_group, sp):
    torch.manual_seed(0)
    plan = {"layers.*.mlp.0": "colwise", "layers.*.mlp.1": "rowwise"}
    example = torch.randn(2, 6, HIDDEN)
    try:
        tpi.parallelize(Stack(), tp_group, plan, sequence_parallel=sp, verify=True, example_inputs=example)
    except ValueError as error:
        return str(error)
    return ""


def test_verify_finds_tokens_that_are_mixed_between_the_blocks():
    """Under sequence parallelism such code sees this rank's tokens alone."""
    assert run_ranks(mixed_tokens_on_rank, 2, False) == ["", ""]
    for text in run_ranks(mixed_tokens_on_rank, 2, True):
        assert "computes something else by this plan than unsharded; nothing was changed" in text


class Mask(nn.Module):
    """A mask of causal attention; as a module it is one of those whose outputs are compared."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        hidden = dict(infinite=-torch.inf, least=torch.finfo(x.dtype).min, nan=torch.nan)[self.what]
        return x.new_full(x.shape[1:2] * 2, hidden).triu(1)


class Masked(nn.Module):
    def __init__(self, what: str, wrong: bool) -> None:
        super().__init__()
        self.up, self.mask, self.down, self.wrong = nn.Linear(HIDDEN, 32), Mask(what), nn.Linear(32, HIDDEN), wrong

    def forward(self, x: Tensor) -> Tensor:
        weights = self.mask(x).nan_to_num(nan=-torch.inf).softmax(-1)
        y = self.up(x)
        return self.down(y - y.mean(-1, keepdim=True) if self.wrong else y) + weights @ x


def verified_masks(tp_group, what, wrong):
    torch.manual_seed(0)
    x, plan = torch.randn(2, 6, HIDDEN), {"up": "colwise", "down": "rowwise"}
    try:
        tpi.parallelize(Masked(what, wrong), tp_group, plan, verify=True, example_inputs=x)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ("infinite", "least", "nan"))
def test_verify_takes_masks(what):
    assert run_ranks(verified_masks, 2, what, False) == ["", ""]
    assert all("the output of down is off by" in text for text in run_ranks(verified_masks, 2, what, True))


class HoldsItself(nn.Module):
    """Functions of several kinds that call modules of the model, which a copy's functions must call in the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN), nn.ReLU()

        def local(x: Tensor) -> Tensor:
            return steps[-1](x)

        steps = [lambda x: self.up(x)]
        self.steps = {"first": (local, lambda x, between=self.between: self.down(between(x)))}
        self.calls = 0
        self.between.register_forward_hook(lambda module, args, y: setattr(self, "calls", self.calls + 1))

    def forward(self, x: Tensor) -> Tensor:
        for function in self.steps["first"]:
            x = function(x)
        return x


def verified_functions(tp_group):
    torch.manual_seed(0)
    model, x = HoldsItself(), torch.randn(2, 6, HIDDEN)
    want = model(x).detach()
    tpi.parallelize(model, tp_group, {"up": "colwise", "down": "rowwise"}, verify=True, example_inputs=x)
    assert model.calls == 1  # that above: the copies call their own
    with tpi.set_tp_invariant_mode(True):
        got = model(x).detach()
    torch.testing.assert_close(got, want)
    return got


def test_verify_of_functions_that_hold_the_model():
    want = verified_functions(None)
    for got in run_ranks(verified_functions, 2):
        testing.assert_bitwise_equal(got, want)


def test_verify_at_tp_1():
    assert verified(None, ("fused", "norm right", "whole"), True) == dict.fromkeys(("fused", "norm right", "whole"), "")


def test_what_verify_cannot_do_it_says():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="verify=True needs something to call Sequential with: give example_inputs"):
        tpi.parallelize(model, None, {"0": "colwise"}, verify=True)
    with pytest.raises(ValueError, match="give both, or neither"):
        tpi.parallelize(model, None, {"0": "colwise"}, example_inputs=torch.randn(2, 4))
    with pytest.raises(TypeError, match="example_inputs is a int"):
        tpi.parallelize(model, None, {"0": "colwise"}, verify=True, example_inputs=3)
    with pytest.raises(ValueError, match="infinite values or NaN"):
        tpi.parallelize(model, None, {"0": "colwise"}, verify=True, example_inputs=torch.full((2, 4), torch.inf))
    with pytest.raises(ValueError, match="on the meta device"):
        tpi.parallelize(nn.Sequential(nn.Linear(4, 4, device="meta")), None, {"0": "colwise"}, verify=True)

    class Counting(nn.Sequential):
        config = types.SimpleNamespace(vocab_size=4)  # not Hugging Face's

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="to call Counting with: give example_inputs"):
        tpi.parallelize(Counting(nn.Linear(4, 4)), None, {"0": "colwise"}, verify=True)
    with pytest.raises(ValueError, match="gives no floating-point tensor"):
        tpi.parallelize(Counting(nn.Linear(4, 4)), None, {"0": "colwise"}, verify=True, example_inputs=torch.ones(2, 4))

    class Noisy(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    with pytest.raises(ValueError, match="differs from one call to the next"):
        tpi.parallelize(Noisy(nn.Linear(4, 4)), None, {"0": "colwise"}, verify=True, example_inputs=torch.randn(2, 4))
    tpi.parallelize(
        Noisy(nn.Linear(4, 4)).eval(), None, {"0": "colwise"}, verify=True, example_inputs=torch.randn(2, 4)
    )
