"""torch's parallel styles with this library's layers: a program for torch's, with another import."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import tp_invariant as tpi
from tp_invariant import styles, testing
from tp_invariant.functional.attention_choice import _safe_sdpa
from tp_invariant.testing import full_grads, full_parameters, run_ranks

VOCABULARY, HIDDEN, HEADS, HEAD, TOKENS = 64, 96, 4, 24, 16  # SDPA gives heads of 24 other bits on a CPU


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.weight = 1e-5, nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotated(x, turns):
    """Without complex numbers, whose products on a CPU depend on where in a vector an element lies."""
    cos, sin = turns
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def own_attention(q, k, v):
    return tpi.attention(q, k, v, causal=True)


class Attention(nn.Module):
    def __init__(self, local_heads: int | None, attend) -> None:
        super().__init__()
        self.attend = attend
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(HIDDEN, HEADS * HEAD, bias=name == "wq"))
        self.heads = local_heads or HEADS  # of DTensors all, of local tensors this rank's

    def forward(self, x, turns):
        shape = x.shape[0], x.shape[1], self.heads, HEAD
        q, k, v = (layer(x).view(shape) for layer in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).contiguous().view(*shape[:2], -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 128, bias=False) for _ in range(2))
        self.w2 = nn.Linear(128, HIDDEN)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, local_heads: int | None, attend) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(local_heads, attend), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), nn.LayerNorm(HIDDEN)

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, local_heads: int | None = None, attend=sdpa) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block(local_heads, attend) for _ in range(2)])
        self.norm, self.output = RMSNorm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(TOKENS), 0.1 ** torch.linspace(0, 2, HEAD // 2)).repeat(1, 2)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]).unsqueeze(2), persistent=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))


def with_sequence_parallel(s, kind: str):
    """torch's documents have this plan, for a block and for what is around the blocks."""
    dtensors = kind == "dtensors"
    take = dict(use_local_output=not dtensors)
    turns = Replicate() if dtensors else None
    block = {
        "attention_norm": s.SequenceParallel(),
        "attention": s.PrepareModuleInput(
            input_layouts=(Shard(1), turns), desired_input_layouts=(Replicate(), turns), **take
        ),
        "attention.wq": s.ColwiseParallel(use_local_output=not dtensors),
        "attention.wk": s.ColwiseParallel(use_local_output=not dtensors),
        "attention.wv": s.ColwiseParallel(use_local_output=not dtensors),
        "attention.wo": s.RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": s.SequenceParallel(),
        "feed_forward": s.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": s.ColwiseParallel(),
        "feed_forward.w2": s.RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": s.ColwiseParallel(),
    }
    around = {
        "tok_embeddings": s.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": s.SequenceParallel(),
        "output": s.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return block, around


class Ours:
    """torch.distributed.tensor.parallel, in which only the three styles are another import."""

    def __getattr__(self, name):
        return getattr(
            tpi if name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel") else torch_styles, name
        )


def on_mesh(tp_group) -> DeviceMesh:
    return DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))


def made(tp_group, kind: str, s) -> nn.Module:
    mesh = on_mesh(tp_group)
    torch.manual_seed(0)
    local_heads = None if kind == "dtensors" else HEADS // tp_group.size()
    model = Transformer(local_heads, own_attention if isinstance(s, Ours) else sdpa)
    block, around = with_sequence_parallel(s, kind)
    s.parallelize_module(model, mesh, around)
    for layer in model.layers:
        s.parallelize_module(layer, mesh, block)
    return model


def trained(tp_group, kind: str, mode: bool = True):
    """Two steps: what each gave."""
    with tpi.set_tp_invariant_mode(mode):
        model = made(tp_group, kind, Ours() if kind == "three imports" else styles)
        assert all(type(p) is DTensor for p in model.parameters())
        assert isinstance(model.layers[1].attention.wq, tpi.Linear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for _ in range(2):
            ids = torch.randint(VOCABULARY, (2, TOKENS))
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(1).flatten())
            optimizer.zero_grad()
            loss.backward()
            steps.append((logits.detach(), loss.detach(), full_grads(model)))
            steps.append(tpi.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        return steps, full_parameters(model)


@pytest.mark.parametrize("kind", ["dtensors", "local", "three imports"])
def test_the_documented_block(kind):
    results = [result for size in (4, 2, 1) for result in run_ranks(trained, size, kind)]
    for result in results:
        testing.assert_bitwise_equal(result, results[-1])


def test_off_the_bits_differ():
    """The negative control."""
    assert len({testing.digest(run_ranks(trained, size, "local", False)[0]) for size in (1, 2)}) == 2


def collectives(tp_group, mode: bool):
    """The names of those of one step: of the layers, of torch's redistributions, of gradients."""
    with tpi.set_tp_invariant_mode(mode):
        # torch's own SDPA takes no DTensors on a CPU
        model = made(tp_group, "dtensors" if mode else "local", styles)
        ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
        with CommDebugMode() as seen:
            model(ids).square().mean().backward()
        return sorted(str(name) for name in seen.get_comm_counts())


def test_nothing_is_added_on_the_wire():
    for on, off in zip(run_ranks(collectives, 2, True), run_ranks(collectives, 2, False), strict=True):
        assert any("gather" in name for name in on) and not any("reduce" in name for name in on), on
        assert any("reduce" in name for name in off), off


def right(tp_group):
    """The error of logits and gradients against float64: of the model itself, of this library, of torch's styles."""
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    exact = None
    errors = []
    for s in (None, styles, torch_styles):
        with tpi.set_tp_invariant_mode(True):
            torch.manual_seed(0)
            model = Transformer().double() if s is None else made(tp_group, "local", s)
            logits = model(ids)
            logits.square().mean().backward()
        found = [logits, *(p.grad for p in model.parameters())]
        found = [(x.full_tensor() if isinstance(x, DTensor) else x).detach().double() for x in found]
        exact = exact or found
        errors.append(max(((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)))
    return errors


def test_the_values_are_right():
    for zero, own, stock in run_ranks(right, 2):
        assert zero == 0.0 and 0.0 < own < 2 * stock < 1e-5


# --- what cannot be served ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: tpi.ColwiseParallel(output_layouts=Shard(0)),
            "ColwiseParallel: output_layouts=S(0) is not supported: choose S(-1) or R",
        ),
        (lambda: tpi.ColwiseParallel(output_layouts=Partial()), f"output_layouts={Partial()} is"),
        (
            lambda: tpi.ColwiseParallel(input_layouts=Shard(-1)),
            "input_layouts=S(-1) is not supported: choose R or Shard(dim) of a dim of tokens, dim >= 0",
        ),
        (lambda: tpi.ColwiseParallel(input_layouts=Partial()), f"input_layouts={Partial()} is"),
        (
            lambda: tpi.ColwiseParallel(input_layouts=_StridedShard(0, split_factor=2)),
            f"input_layouts={_StridedShard(0, split_factor=2)} is",
        ),
        (lambda: tpi.RowwiseParallel(output_layouts=Shard(-1)), "output_layouts=S(-1)"),
        (lambda: tpi.RowwiseParallel(output_layouts=Partial()), f"output_layouts={Partial()} is"),
        (lambda: tpi.RowwiseParallel(input_layouts=Shard(1)), "input_layouts=S(1) is not supported: choose S(-1) or R"),
        (lambda: tpi.SequenceParallel(sequence_dim=-2), "sequence_dim=-2 must be an integer from 0"),
    ],
)
def test_layouts_that_cannot_be_served(make, told):
    with pytest.raises(ValueError) as caught:
        make()
    assert told in str(caught.value)


def said(call) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def modules_refused(tp_group):
    mesh, rank = on_mesh(tp_group), tp_group.rank()
    apply = torch_styles.parallelize_module
    colwise, rowwise, sequence = tpi.ColwiseParallel(), tpi.RowwiseParallel(), tpi.SequenceParallel()
    torch.manual_seed(0)

    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    tied = nn.ModuleList([nn.Embedding(8, 8), nn.Linear(8, 8)])
    tied[1].weight = tied[0].weight
    hooked, patched = (nn.Linear(8, 8) for _ in range(2))
    hooked.weight.register_hook(lambda grad: None)
    patched.forward = lambda x: x
    torchs = apply(nn.Linear(8, 8), mesh, torch_styles.ColwiseParallel())
    ours = apply(nn.Linear(8, 8), mesh, colwise)
    cases = [
        (hooked, colwise, f"ColwiseParallel of Linear on rank {rank}: weight: has hooks"),
        (patched, colwise, "has a forward of its own"),
        (torchs, colwise, "weight is a DTensor: the model is sharded already"),
        (torchs, colwise, "import ColwiseParallel, RowwiseParallel and SequenceParallel from tp_invariant in place of"),
        (ours, colwise, "is a layer of this library already"),
        (Odd(8, 8), colwise, "must be an nn.Linear, without a forward of its own"),
        (nn.Linear(8, 7), colwise, "out_features=7 is not divisible"),
        (nn.Embedding(8, 8), colwise, "take RowwiseParallel(input_layouts=Replicate(), ..)"),
        (nn.Embedding(8, 8), rowwise, "has input_layouts=S(-1): an embedding needs all ids on every rank"),
        (nn.LayerNorm(8), rowwise, "must be an nn.Linear or nn.Embedding"),
        (nn.Linear(8, 8), sequence, "computes no LayerNorm or RMSNorm"),
    ]
    wrong = []
    for module, style, told in cases:
        before = type(module)
        text = said(lambda module=module, style=style: apply(module, mesh, style))
        if told not in text or type(module) is not before:
            wrong.append((told, text))
    dropped, x = apply(nn.Dropout(0.1), mesh, sequence), torch.ones(2, 3, 8)
    with tpi.set_tp_invariant_mode(True):
        text = said(lambda: dropped(x))
        assert f"SequenceParallel of Dropout on rank {rank} has p=0.1: its mask would depend on the degree" in text
        assert torch.equal(dropped.eval()(x).to_local(), x)
    torch.manual_seed(rank)
    other = nn.Linear(8, 8)
    text = said(lambda: apply(other, mesh, colwise))
    assert "hold different weights in 2 of 2 parameters" in text and type(other) is nn.Linear
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    apply(model, mesh, {"0": torch_styles.ColwiseParallel()})
    text = said(lambda: tpi.parallelize(model, tp_group, {"0": "colwise"}))
    assert "0.weight is a DTensor: the model is sharded already" in text and "from tp_invariant in place of" in text
    return wrong


def test_modules_that_are_refused():
    assert run_ranks(modules_refused, 2) == [[], []]


def called_wrongly(tp_group):
    """Activations placed otherwise than the style says, and gradients that are sums not yet added."""
    mesh = on_mesh(tp_group)
    torch.manual_seed(0)
    colwise, rowwise, norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
    apply = styles.parallelize_module
    apply(colwise, mesh, tpi.ColwiseParallel(use_local_output=False))
    apply(rowwise, mesh, tpi.RowwiseParallel(use_local_output=False))
    apply(norm, mesh, tpi.SequenceParallel())
    x = torch.randn(2, 4, 16)
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    part = DTensor.from_local(x + tp_group.rank(), mesh, [Shard(1)], run_check=False)
    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    for layer, wrong in ((colwise, part), (colwise, partial), (norm, whole), (norm, partial), (rowwise, whole)):
        assert f"is a DTensor placed as {wrong.placements}" in said(lambda layer=layer, wrong=wrong: layer(wrong))
    assert "was given NoneType as its first argument" in said(lambda: colwise())
    y = colwise(input=whole)
    assert y.placements == (Shard(2),) and rowwise(y).placements == (Replicate(),)
    assert norm(part).placements == (Shard(1),)
    with torch.no_grad():
        late = part.redistribute(placements=[Replicate()], async_op=True)
        testing.assert_bitwise_equal(colwise(late).to_local(), colwise(part.full_tensor()).to_local())
    plan = {"": torch_styles.ColwiseParallel()}
    assert "import ColwiseParallel from tp_invariant in place of" in said(lambda: apply(nn.Linear(8, 8), mesh, plan))
    derived = type("Derived", (torch_styles.RowwiseParallel,), {})
    text = said(lambda: apply(nn.Linear(8, 8), mesh, {"": derived()}))
    assert "is of a class that is derived from torch's" in text and "import RowwiseParallel from tp_inv" in text
    ours = type("OursDerived", (tpi.RowwiseParallel,), {})
    assert isinstance(apply(nn.Linear(8, 8), mesh, {"": ours()}), tpi.Linear)
    other = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("other",))
    assert "x of Linear on rank" in said(lambda: colwise(DTensor.from_local(x, other, [Replicate()])))
    scaled = rowwise(y)[..., :1] * y  # the gradient of the first, which is whole, is a sum over the ranks' features
    return said(lambda: scaled.to_local().sum().backward())


def test_activations_that_are_refused():
    for text in run_ranks(called_wrongly, 2):
        assert f"the gradient of the output of Linear arrives as a DTensor placed as {(Partial(),)}" in text


def prepared(tp_group):
    """torch's PrepareModuleOutput and PrepareModuleInputOutput beside this library's styles; copies and pickles."""
    mesh = on_mesh(tp_group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), FeedForward())
    model[1].w1, model[1].w3, model[1].w2 = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
    plan = {
        "0": tpi.SequenceParallel(),
        "1.w1": tpi.ColwiseParallel(),
        "1.w3": tpi.ColwiseParallel(),
        "1.w2": tpi.RowwiseParallel(use_local_output=False),
        "1": styles.PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
    }
    styles.parallelize_module(model, mesh, plan)
    x = torch.randn(2, 8, 32)
    results = []
    twin = copy.deepcopy(model)
    twin[1].w2, twin[0] = (pickle.loads(pickle.dumps(layer)) for layer in (twin[1].w2, twin[0]))
    for one in (model, twin):
        part = tpi.regions.scatter_sequence(x.clone().requires_grad_(), tp_group, 1)
        part.retain_grad()
        y = one(part)
        y.square().sum().backward()
        y, dx = (tpi.regions.gather_sequence(z.detach(), tp_group, 1) for z in (y, part.grad))
        results.append((y, dx, full_grads(one)))
    testing.assert_bitwise_equal(*results)
    return results[0]


def test_torchs_own_styles_beside_them():
    with tpi.set_tp_invariant_mode(True):
        results = [result for size in (4, 2, 1) for result in run_ranks(prepared, size)]
    for result in results:
        testing.assert_bitwise_equal(result, results[-1])


class Heads(nn.Module):
    """A norm of each head, which DTensors call a sequence dim that holds heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.out = nn.Linear(32, 64), nn.RMSNorm(16, eps=1e-6), nn.Linear(64, 32)

    def forward(self, x):
        q = self.norm(self.q(x).unflatten(-1, (-1, 16)))
        return self.out(q.flatten(-2))


def from_meta(tp_group):
    """Made on the meta device, sharded, and only then given memory and values."""
    mesh = on_mesh(tp_group)
    with torch.device("meta"):
        model = Heads()
    plan = {
        "q": tpi.ColwiseParallel(),
        "norm": tpi.SequenceParallel(sequence_dim=2, use_local_output=True),
        "out": tpi.RowwiseParallel(),
    }
    torch_styles.parallelize_module(model, mesh, plan)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model.children():
        layer.reset_parameters()
    torch.manual_seed(0)
    plain = Heads()
    testing.assert_bitwise_equal(full_parameters(model), dict(plain.named_parameters()))
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))
    y, exact = model(x), plain.double()(x.double())
    y.square().sum().backward()
    exact.square().sum().backward()
    for name, grad in full_grads(model).items():
        exact_grad = plain.get_parameter(name).grad
        assert (grad.double() - exact_grad).norm() < 1e-5 * exact_grad.norm()
    return y.detach(), full_grads(model)


def test_from_the_meta_device_with_a_norm_of_each_head():
    with tpi.set_tp_invariant_mode(True):
        results = [result for size in (4, 2, 1) for result in run_ranks(from_meta, size)]
    for result in results:
        testing.assert_bitwise_equal(result, results[-1])


def compiled(tp_group):
    """A block in eager mode, and as one graph."""
    with tpi.set_tp_invariant_mode(True):
        model = made(tp_group, "dtensors", styles)
        block, results = model.layers[0].feed_forward, []
        x = DTensor.from_local(torch.randn(2, TOKENS // tp_group.size(), HIDDEN), on_mesh(tp_group), [Shard(1)])
        for one in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            block.zero_grad()
            y = one(x)
            y.square().mean().backward()
            results.append((y.detach(), full_grads(block)))
        testing.assert_bitwise_equal(*results)


def test_compiled():
    run_ranks(compiled, 2)


def attended(tp_group):
    """F.scaled_dot_product_attention of DTensors, as modules with sharded layers have it, against plain tensors."""
    mesh = on_mesh(tp_group)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    mask = torch.ones(8, 8, dtype=torch.bool).tril(2)
    whole = _safe_sdpa(q, k, v, mask)

    def placed(x, placement):
        return distribute_tensor(x, mesh, [placement])

    for placement in (Shard(0), Shard(1), Replicate()):
        for given in (mask, placed(mask, Replicate())):
            y = _safe_sdpa(*(placed(x, placement) for x in (q, k, v)), given)
            assert y.placements == (placement,)
            testing.assert_bitwise_equal(y.full_tensor(), whole)
    heads = [placed(x, Shard(1)) for x in (q, k, v)]
    wrong = [[q, *heads[1:]], [heads[0], placed(k, Replicate()), heads[2]], [placed(x, Shard(2)) for x in (q, k, v)]]
    for given in wrong:
        assert "all three must be plain tensors, or DTensors on one mesh" in said(
            lambda given=given: _safe_sdpa(*given)
        )
    assert "it must be Replicate" in said(lambda: _safe_sdpa(*heads, placed(mask, Shard(0))))


def test_attention_of_dtensors():
    with tpi.set_tp_invariant_mode(True):
        run_ranks(attended, 2)
