"""Parameters over a DeviceMesh: DTensors that say how they are sharded, with the bits of plain shards."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from error_texts import refused
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core.dtensors import local_of
from tp_invariant.owners import weight_cache
from tp_invariant.testing import full_grads, full_parameters, run_ranks

TOKENS = 24


def on_mesh(tp_group) -> DeviceMesh:
    return DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))


class Block(nn.Module):
    """Every kind of layer, a tie, a padded vocabulary, stacked pieces, and a parameter that is nobody's layer's."""

    def __init__(self, tp, sequence_parallel: bool = False, device=None) -> None:
        super().__init__()
        sp = dict(tp_group=tp, sequence_parallel=sequence_parallel, device=device)
        self.embed = tpi.VocabParallelEmbedding(30, 32, pad_vocab_to_multiple_of=8, **sp)
        self.fc1 = tpi.LayerNormLinear(32, 128, parallel_mode="column", partition_stride=2, **sp)
        self.fc2 = tpi.Linear(64, 32, parallel_mode="row", **sp)
        self.norm = tpi.ParallelNorm(32, bias=True, normalization="LayerNorm", **sp)
        self.whole = tpi.Linear(32, 32, **sp)
        sp["sequence_parallel"] = False
        self.head = tpi.Linear(32, 32, parallel_mode="column", bias=False, gather_output=True, **sp)
        self.head.weight = self.embed.weight
        self.sequence_parallel = sequence_parallel

    def forward(self, ids):
        x = self.embed(ids)
        gate, up = self.fc1(x).chunk(2, -1)
        x = self.whole(self.norm(x + self.fc2(F.relu(gate) * up)))
        if self.sequence_parallel:
            x = tpi.regions.gather_sequence(x, self.head.group)
        return self.head(x)


def trained(tp_group, kind: str, sequence_parallel: bool, dtype: torch.dtype, mode: bool = True):
    """Three steps with accumulation: what each gave."""
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(mode):
        model = Block(tp, sequence_parallel).to(dtype)
        kinds = {DTensor} if kind == "mesh" else {nn.Parameter}
        assert {type(p) for p in model.parameters()} == kinds and model.head.weight is model.embed.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                torch.manual_seed(10 * step + part)
                y = model(torch.randint(30, (TOKENS,)))
                y.float().square().mean().backward()
            grads = full_grads(model)
            steps.append((y.detach(), grads, tpi.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        for p in model.parameters():
            assert kind != "mesh" or (type(p.grad) is DTensor and p.grad.placements == p.placements)
        return steps, full_parameters(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_bits_are_those_of_plain_shards(sequence_parallel, dtype):
    expected = run_ranks(trained, 1, "group", sequence_parallel, dtype)[0]
    for size in (1, 2, 4):
        for result in run_ranks(trained, size, "mesh", sequence_parallel, dtype):
            testing.assert_bitwise_equal(result, expected)


def test_off_the_bits_differ():
    """The negative control: on a mesh, too, the layers go by the mode."""
    digests = {
        testing.digest(run_ranks(trained, size, kind, True, torch.float32, False)[0])
        for size, kind in ((1, "mesh"), (2, "mesh"))
    }
    assert len(digests) == 2
    plain = testing.digest(run_ranks(trained, 2, "group", True, torch.float32, False)[0])
    assert plain in digests


def right(tp_group):
    """y, dx and dw of two layers against float64."""
    tp = on_mesh(tp_group)
    torch.manual_seed(0)
    model = nn.Sequential(
        tpi.Linear(64, 96, parallel_mode="column", tp_group=tp), tpi.Linear(96, 64, parallel_mode="row", tp_group=tp)
    )
    x, dy = torch.randn(2, TOKENS, 64).unbind()
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    full = [p.double().requires_grad_() for p in full_parameters(model).values()]
    exact_x = x.detach().double().requires_grad_()
    exact = F.linear(F.linear(exact_x, *full[:2]), *full[2:])
    exact.backward(dy.double())
    grads = zip(full_grads(model).values(), [p.grad for p in full], strict=True)
    for own, other in [(y, exact), (x.grad, exact_x.grad), *grads]:
        assert (own.double() - other).norm() < 1e-6 * other.norm()


def test_the_values_are_right():
    with tpi.set_tp_invariant_mode(True):
        run_ranks(right, 2)


def placed(tp_group):
    tp = on_mesh(tp_group)
    torch.manual_seed(0)
    model = Block(tp)
    expected = {
        "embed.weight": Shard(0),
        "fc1.weight": _StridedShard(0, split_factor=2),
        "fc1.bias": _StridedShard(0, split_factor=2),
        "fc2.weight": Shard(1),
    }
    full = full_parameters(model)
    for name, p in model.named_parameters():
        assert isinstance(p, nn.Parameter) and p.requires_grad and p.device_mesh == tp
        assert p.placements == (expected.get(name, Replicate()),), name
        whole = p.full_tensor().detach()
        testing.assert_bitwise_equal(whole[:30] if name == "embed.weight" else whole, full[name])
        assert p.tensor_model_parallel is False and p.tp_group == (model.fc1.group if tp_group.size() > 1 else None)
        assert p.partition_dim == getattr(p.placements[0], "dim", -1)
    assert model.fc1.weight.partition_stride == 2

    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight is not model.embed.weight
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert type(q) is DTensor and isinstance(q, nn.Parameter) and q.placements == p.placements, name
        assert q.device_mesh == tp and q.partition_dim == p.partition_dim and q.tp_group == p.tp_group
        assert q._local_tensor.data_ptr() != p._local_tensor.data_ptr()
    testing.assert_bitwise_equal(full_parameters(twin), full)

    torch.manual_seed(0)
    late = Block(tp, device="meta")
    assert all(type(p) is DTensor and p.is_meta for p in late.parameters())
    late.to_empty(device="cpu")
    for layer in (late.embed, late.fc1, late.fc2, late.norm, late.whole):
        layer.reset_parameters()
    assert late.head.weight is late.embed.weight
    again = full_parameters(late)
    assert all(torch.equal(again[name], full[name]) for name in full if name != "head.weight")
    assert late.fc1.weight.placements == model.fc1.weight.placements and late.fc1.weight.partition_dim == 0

    linear, embedding, norm = nn.Linear(32, 64), nn.Embedding(16, 32), nn.LayerNorm(32)
    linear.bias.requires_grad_(False)
    row = tpi.Linear.from_linear(linear, parallel_mode="row", tp_group=tp)
    assert row.weight.placements == (Shard(1),) and row.bias.requires_grad is False
    testing.assert_bitwise_equal(row.weight.full_tensor().detach(), linear.weight.detach())
    both = tpi.LayerNormLinear.from_linear(linear, parallel_mode="column", partition_stride=2, tp_group=tp)
    testing.assert_bitwise_equal(both.weight.full_tensor().detach(), linear.weight.detach())
    assert torch.equal(both.layer_norm_weight.full_tensor(), torch.ones(32))
    table = tpi.VocabParallelEmbedding.from_embedding(embedding, tp_group=tp)
    testing.assert_bitwise_equal(table.weight.full_tensor().detach(), embedding.weight.detach())
    parallel_norm = tpi.ParallelNorm.from_norm(norm, tp_group=tp)
    assert parallel_norm.bias.placements == (Replicate(),)

    row.weight = nn.Parameter(torch.full_like(local_of(row.weight), 3.0))  # this rank's part
    assert row.weight.placements == (Shard(1),) and row.weight.shape == (64, 32) and row.weight.partition_dim == 1
    text = refused(ValueError, lambda: setattr(row, "weight", table.weight))
    assert "weight of Linear is a DTensor placed as (Shard(dim=0),) on rank" in text
    other = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    foreign_mesh = DTensor.from_local(torch.zeros(64, 32), other, [Replicate()], run_check=False)
    if tp_group.size() > 1:
        text = refused(ValueError, lambda: setattr(row, "weight", nn.Parameter(foreign_mesh)))
        assert "which does not have the ranks of" in text and "it must be placed as (Shard(dim=1),)" in text
    row.weight.partition_stride = 2
    text = refused(ValueError, lambda: row(torch.ones(2, 32 // tp_group.size())))
    assert "weight.partition_stride=2 was set on rank" in text and "give it to the constructor" in text
    sizes = dict(parallel_mode="column", partition_sizes=(32, 16, 16), tp_group=tp)
    text = refused(ValueError, lambda: tpi.Linear(32, 64, **sizes))
    assert "partition_sizes=(32, 16, 16) cannot be had with tp_group as a DeviceMesh" in text
    fused = tpi.Linear(32, 32, parallel_mode="column", fuse_wgrad_accumulation=True, tp_group=tp)
    text = refused(ValueError, lambda: fused(torch.ones(2, 32)))
    assert "fuse_wgrad_accumulation=True of Linear(32, 32, 'column') on rank" in text
    return full


def test_what_parameters_say():
    one, two = (run_ranks(placed, size)[0] for size in (1, 2))
    testing.assert_bitwise_equal(one, two)


def written_to(tp_group):
    """What goes by a weight's version must see what is written to the DTensor."""
    tp = on_mesh(tp_group)
    torch.manual_seed(0)
    layer = tpi.Linear(32, 32, parallel_mode="row", tp_group=tp, owner_map="rows")
    x = torch.randn(8, 32).chunk(tp_group.size(), 1)[tp_group.rank()].clone().requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    text = refused(RuntimeError, lambda: y.sum().backward())
    assert "has been modified by an inplace operation" in text
    seen = []
    for keep in (0, 4):
        weight_cache.clear()
        weight_cache.keep = keep
        try:
            torch.manual_seed(1)
            layer.reset_parameters()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                layer(x).square().sum().backward()
                optimizer.step()
                with torch.no_grad():
                    before = layer(x)
                    layer.weight.copy_(layer.weight * 1.5)
                    after = layer(x)
                assert not torch.equal(before, after)
                seen.append((keep, before, after))
        finally:
            weight_cache.keep = 0
            weight_cache.clear()
    testing.assert_bitwise_equal([s[1:] for s in seen[:3]], [s[1:] for s in seen[3:]])
    before = layer(x)
    layer.weight.data = layer.weight.data * 1.5  # torch replaces what the DTensor shows, not what it holds
    testing.assert_bitwise_equal(layer(x), before)
    layer.weight.data.mul_(1.5)
    assert not torch.equal(layer(x), before)


def test_writes_are_seen():
    with tpi.set_tp_invariant_mode(True):
        run_ranks(written_to, 2)


def called(tp_group, kind):
    """In other ways than by module(x)."""
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    torch.manual_seed(0)
    layer = tpi.LayerNormLinear(
        32, 64, parallel_mode="column", tp_group=tp, return_bias=True, gather_output=True, return_layernorm_output=True
    )
    norm = tpi.ParallelNorm(32, tp_group=tp)
    x = torch.randn(8, 32, requires_grad=True)
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        y, bias, normed = layer(norm(x))
        (y.float() + bias + normed.float().sum()).square().sum().backward()
    results.append((y.detach(), full_grads(layer), full_grads(norm), x.grad))
    names = dict(layer.named_parameters())
    other = {name: p.detach() * 2 for name, p in names.items()}
    results.append(torch.func.functional_call(layer, other, (x,))[0].detach())
    locals_ = {name: local_of(p).detach() * 2 for name, p in names.items()}
    results.append(torch.func.functional_call(layer, locals_, (x,))[0].detach())
    assert torch.equal(results[-1], results[-2])
    grads = torch.autograd.grad(layer(x)[0].sum(), [layer.weight, layer.layer_norm_weight])
    results.append([layer.shard_spec(n).full(g) for n, g in zip(("weight", "layer_norm_weight"), grads, strict=True)])
    if tpi.is_tp_invariant_mode_enabled():
        (once,) = torch.autograd.grad(layer(x)[0].square().sum(), layer.weight, create_graph=True)
        assert "once_differentiable" in refused(RuntimeError, lambda: once.sum().backward())
    seen = []
    handle = layer.weight.register_hook(lambda grad: seen.append(type(grad)))
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)[0].sum().backward()
    handle.remove()
    assert seen == [type(layer.weight.grad)]
    results.append(full_grads(layer))
    return results


@pytest.mark.parametrize("mode", [True, False])
def test_other_ways_to_call(mode):
    with tpi.set_tp_invariant_mode(mode):
        for own, other in zip(run_ranks(called, 2, "mesh"), run_ranks(called, 2, "group"), strict=True):
            testing.assert_bitwise_equal(own, other)


# --- modules that are not ours --------------------------------------------------------------------------------------


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32))
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(32)), nn.Parameter(torch.rand(32))])
        self.inner = nn.Linear(32, 32)
        self.inner.bias = self.parts[1]

    def forward(self, x):
        return self.inner(x * self.scale) + self.parts[0]


def foreign(tp_group, kind):
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    torch.manual_seed(0)
    model = nn.Sequential(
        tpi.Linear(32, 64, parallel_mode="column", tp_group=tp),
        tpi.Linear(64, 32, parallel_mode="row", tp_group=tp),
        Foreign(),
    )
    if kind == "mesh":
        names = list(model.state_dict())
        assert tpi.replicate_(model, tp) is model and list(model.state_dict()) == names
        assert all(type(p) is DTensor for p in model.parameters())
        assert isinstance(model[2], Foreign) and type(model[2].scale) is DTensor
        assert dict(model.named_parameters())["2.parts.1"] is model[2].inner._parameters["bias"]  # a tie
        model = copy.deepcopy(model)
        assert isinstance(model[2], Foreign) and type(model[2].inner.weight) is DTensor
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        y = model(torch.randn(8, 32))
        y.square().sum().backward()
        results.append((y.detach(), tpi.clip_grad_norm_(model.parameters(), 1.0), full_grads(model)))
        optimizer.step()
    return results, full_parameters(model)


def test_other_modules_see_local_tensors():
    with tpi.set_tp_invariant_mode(True):
        plain = run_ranks(foreign, 2, "group")
        testing.assert_bitwise_equal(run_ranks(foreign, 2, "mesh"), plain)


class OnlyReads(nn.Module):
    """Has no parameters of its own, and reads those of the modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.listed = nn.ParameterList([nn.Parameter(torch.rand(32)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.rand(32))})

    def forward(self, x):
        for scale in self.listed:
            x = x * scale
        x = F.linear(x, self.one.weight, self.two.bias) + self.named["shift"]
        return torch.utils.checkpoint.checkpoint(lambda x: x + self.two.weight[0], x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrized() -> nn.Module:
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    torch.nn.utils.parametrize.register_parametrization(linear, "bias", Halved())
    return linear


FOREIGN = {
    "only reads": OnlyReads,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2
    ),
    "MultiheadAttention": Attention,
    "LSTM": Recurrent,
    "weight_norm by a hook": lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(32, 32))),
    "parametrizations": lambda: nn.Sequential(parametrized()),
    "a parametrization alone": parametrized,
}


def kinds_of_foreign(tp_group, kind):
    """Forward, backward and a step of each: trained, then evaluated, a copy, and one that was pickled."""
    results = {}
    for name, build in FOREIGN.items():
        torch.manual_seed(0)
        model = build()
        if kind == "mesh":
            tpi.replicate_(model, on_mesh(tp_group))
            assert {type(p) for p in model.parameters()} == {DTensor}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(2, 4, 32)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        assert kind == "group" or {type(p.grad) for p in model.parameters()} <= {DTensor, type(None)}, name
        copies = []
        if name != "weight_norm by a hook":  # its computed weight is no leaf, which torch cannot copy
            copies.append(copy.deepcopy(model))
        if copies and "parametrization" not in name:  # torch refuses to pickle those
            copies.append(pickle.loads(cloudpickle.dumps(model)))
        with torch.no_grad():
            found = [model.eval()(x), full_grads(model)]
            for p in model.parameters():
                p.zero_()  # of which the copies know nothing
            for twin in copies:
                assert type(twin) is type(model)
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    assert type(q) is type(p) and getattr(q, "tp_group", None) == getattr(p, "tp_group", None)
                found.append(twin.eval()(x))
        results[name] = found
    return results


def test_modules_that_read_parameters_in_ways_of_their_own_and_their_copies():
    with tpi.set_tp_invariant_mode(True):
        plain = run_ranks(kinds_of_foreign, 2, "group")
        testing.assert_bitwise_equal(run_ranks(kinds_of_foreign, 2, "mesh"), plain)


def written_between(tp_group, kind):
    """What backward says when something was written after forward."""
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    said = {}
    for name in ("weight", "bias", "layer_norm_weight", "scale", "shift"):
        for by in ("optimizer", "copy_"):
            torch.manual_seed(0)
            layer = tpi.LayerNormLinear(16, 16, parallel_mode="column", gather_output=True, tp_group=tp)
            model = nn.Sequential(layer, Affine())
            if kind == "mesh":
                tpi.replicate_(model, tp)
            p = dict(layer.named_parameters()).get(name, getattr(model[1], name, None))
            y = model(torch.randn(4, 16, requires_grad=True))
            if by == "optimizer":
                p.grad = torch.zeros_like(p)
                torch.optim.SGD([p], lr=0.1).step()
            else:
                with torch.no_grad():
                    p.copy_(p * 2)
            p.grad = None
            try:
                y.square().sum().backward()
                said[name, by] = "right"
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error) or "modified inplace" in str(error)
                said[name, by] = "refused"
    return said


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

    def forward(self, x):
        return x * self.scale + self.shift


def test_what_is_written_between_forward_and_backward():
    """Refused where backward needs the former values, as with plain tensors, and only there."""
    with tpi.set_tp_invariant_mode(True):
        plain = run_ranks(written_between, 2, "group")
        assert set(plain[0].values()) == {"right", "refused"}
        assert run_ranks(written_between, 2, "mesh") == plain


def not_replicated(tp_group):
    tp = on_mesh(tp_group)
    text = refused(TypeError, lambda: tpi.replicate_(nn.Linear(2, 2), tp_group))
    assert text.endswith("is a ProcessGroupGloo: pass a 1-D DeviceMesh") or "ProcessGroup: pass a 1-D" in text
    shard = nn.Sequential(nn.Linear(2, 2), tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group))
    text = refused(ValueError, lambda: tpi.replicate_(shard, tp))
    assert "1.weight with shape (4, 8) on rank" in text and type(shard[0].weight) is nn.Parameter
    torch.manual_seed(torch.distributed.get_rank(tp_group))
    other = nn.Linear(2, 2)
    text = refused(RuntimeError, lambda: tpi.replicate_(other, tp))
    assert "hold different weights in 2 of 2 parameters; nothing was changed" in text
    assert type(other.weight) is nn.Parameter
    torch.manual_seed(0)
    linear = tpi.replicate_(nn.Linear(2, 2), tp)
    again = pickle.loads(pickle.dumps(nn.Sequential(nn.ReLU(), linear.to(torch.bfloat16))))
    assert isinstance(again[1], nn.Linear) and again[1].weight.placements == (Replicate(),)
    assert type(again(torch.ones(1, 2, dtype=torch.bfloat16))) is torch.Tensor


def test_what_cannot_be_replicated():
    run_ranks(not_replicated, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.scale, self.qkv = Mlp(), nn.Parameter(torch.rand(32)), nn.Linear(32, 64)

    def forward(self, x):
        return self.qkv(self.mlp(x) * self.scale)


def parallelized(tp_group, kind, verify):
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 32)
    plan = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    if kind == "mesh":
        sizes = {**plan, "qkv": tpi.Part("colwise_gather_output", sizes=(32, 16, 16))}
        text = refused(ValueError, lambda: tpi.parallelize(model, tp, sizes))
        assert "qkv: partition_sizes=(32, 16, 16) cannot be had with tp_group as a DeviceMesh" in text
        assert type(model.mlp.up) is nn.Linear
    tpi.parallelize(model, tp, plan, verify=verify, example_inputs=x if verify else None)
    if kind == "mesh":
        assert {name: str(p.placements[0]) for name, p in model.named_parameters() if "weight" in name} == {
            "mlp.up.weight": "S(0)", "mlp.down.weight": "S(1)", "qkv.weight": "R"
        }  # fmt: skip
        assert all(type(p) is DTensor for p in model.parameters())
        text = refused(ValueError, lambda: tpi.parallelize(model, tp, plan))
        assert "is a DTensor: the model is sharded already" in text
    y = model(x)
    y.square().sum().backward()
    norm = tpi.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    return y.detach(), norm, full_grads(model), full_parameters(model)


@pytest.mark.parametrize("verify", [False, True])
def test_parallelize(verify):
    with tpi.set_tp_invariant_mode(True):
        plain = run_ranks(parallelized, 2, "group", False)
        testing.assert_bitwise_equal(run_ranks(parallelized, 2, "mesh", verify), plain)


def compiled(tp_group, kind):
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    torch.manual_seed(0)
    model, ids = Block(tp), torch.randint(30, (TOKENS,))
    y = model(ids)
    y.square().sum().backward()
    eager = y.detach(), full_grads(model)
    model.zero_grad()
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(ids)
    y.square().sum().backward()
    assert all(type(p.grad) is type(p) or kind == "group" for p in model.parameters())
    testing.assert_bitwise_equal((y.detach(), full_grads(model)), eager)
    if kind == "mesh" and tp_group.size() == 1:  # a copy, and a DTensor's gradient
        x, dy = torch.randn(2, 4, 3).unbind()
        x = DTensor.from_local(x, tp, [Replicate()]).requires_grad_()
        y = torch.compile(tpi.regions.gather_sequence, fullgraph=True, backend="aot_eager")(x, tp_group)
        y.backward(dy)
        testing.assert_bitwise_equal((y.detach(), x.grad.to_local()), (x.detach().to_local(), dy))


@pytest.mark.parametrize("size", [1, 2])
def test_compiled(size):
    with tpi.set_tp_invariant_mode(True):
        run_ranks(compiled, size, "mesh")


def dtensor_inputs(tp_group):
    """Layers and functions that take a DTensor in place of an activation, or refuse it in other words."""
    mesh, sizes = on_mesh(tp_group), dict(tp_group=tp_group)
    x, ids, heads = torch.randn(4, 16), torch.zeros(4, dtype=torch.int64), torch.randn(1, 2, 4, 16)
    calls = {
        "x of Linear(16, 16, 'column')": (tpi.Linear(16, 16, parallel_mode="column", **sizes), x),
        "x of LayerNormLinear(16, 16, 'column')": (
            tpi.LayerNormLinear(16, 16, parallel_mode="column", tp_group=mesh),
            x,
        ),
        "x of a ParallelNorm": (tpi.ParallelNorm(16, **sizes), x),
        "ids of a VocabParallelEmbedding": (tpi.VocabParallelEmbedding(16, 4, **sizes), ids),
        "logits": (lambda x: tpi.vocab_parallel_cross_entropy(x, ids, **sizes), x),
        "q": (lambda q: tpi.attention(q, heads, heads), heads),
    }
    wrong = []
    for placement in (Shard(0), Replicate(), Partial()):
        for name, (call, plain) in calls.items():
            for mode in (True, False):
                with tpi.set_tp_invariant_mode(mode):
                    try:
                        call(DTensor.from_local(plain, mesh, [placement], run_check=False))
                        wrong.append((name, str(placement), mode))
                    except TypeError as error:
                        if not str(error).startswith(f"{name} is a DTensor of shape"):
                            wrong.append((name, str(placement), mode, str(error)))
    return wrong


def test_an_activation_that_is_a_dtensor_is_refused():
    """Its local tensor alone would lose the sum of a Partial one, and take a part of a sharded one for the whole."""
    assert run_ranks(dtensor_inputs, 2) == [[], []]


def test_replicate_refuses_hooks_and_keeps_gradients():
    def on_rank(tp_group):
        mesh, said = on_mesh(tp_group), []
        for change in (
            lambda p: p.register_hook(lambda grad: None),
            lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
        ):
            torch.manual_seed(0)
            module = nn.Linear(4, 4)
            change(module.bias)
            try:
                tpi.replicate_(module, mesh)
            except ValueError as error:
                said.append((str(error).partition(",")[0], isinstance(module.weight, DTensor)))
        module = nn.Linear(4, 4).requires_grad_()
        module.bias.grad, module.bias.no_decay = torch.arange(4.0), True
        tpi.replicate_(module, mesh)
        assert module.weight.grad is None and module.bias.no_decay
        said.append(module.bias.grad.to_local())
        module = nn.Linear(4, 4)
        module.bias.grad = torch.full((4,), float(mesh.get_local_rank()))
        with pytest.raises(RuntimeError, match="different weights in 1 of 1 gradients"):
            tpi.replicate_(module, mesh)
        return said

    for said in run_ranks(on_rank, 2):
        assert said[:2] == [("bias: has hooks", False)] * 2 and said[2].tolist() == [0.0, 1.0, 2.0, 3.0]


# --- on GPUs --------------------------------------------------------------------------------------------------------


def stepped_on_gpus(tp_group, kind: str, mode: bool = True):
    """Parameters after three steps of Muon (matrices) and of fused AdamW (the rest), in bfloat16."""
    mesh = DeviceMesh.from_group(tp_group, "cuda", mesh_dim_names=("tp",))
    options = dict(tp_group=mesh if kind == "mesh" else tp_group, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(mode):
        model = nn.Sequential(
            tpi.LayerNormLinear(512, 1024, parallel_mode="column", sequence_parallel=True, **options),
            nn.GELU(),
            tpi.Linear(1024, 512, parallel_mode="row", sequence_parallel=True, **options),
        )
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        optimizers = tpi.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, fused=True)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16).chunk(tp_group.size())[tp_group.rank()]
            model.zero_grad()
            model(x).float().square().sum().backward()
            norm = tpi.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
        return norm.cpu(), {name: p.cpu() for name, p in full_parameters(model).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_on_gpus(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    expected = run_ranks(stepped_on_gpus, 1, "group", device="cuda")[0]
    for kind in ("group", "mesh"):
        for result in run_ranks(stepped_on_gpus, size, kind, device="cuda"):
            testing.assert_bitwise_equal(result, expected)
    off = run_ranks(stepped_on_gpus, size, "mesh", False, device="cuda")[0]
    assert testing.digest(off) != testing.digest(expected), "the control"


def made_of_fakes(tp_group):
    mesh = on_mesh(tp_group)
    with FakeTensorMode():
        layer = tpi.Linear(8, 16, parallel_mode="column", tp_group=mesh)
    return layer.weight.placements, layer.weight.shape


def test_layers_over_a_mesh_are_made_of_fake_tensors():
    assert run_ranks(made_of_fakes, 2) == [((Shard(0),), (16, 8))] * 2
