"""What the programs of the fuzzer run on: data from a seed, shards, a training loop, and the results gathered whole.

A program (fuzz_programs.py) becomes the source of two functions (fuzz_source.py): one builds and trains the model of
this library's layers on a `Run`, the other the same model of torch's functions on a `Reference`. A failing program is
written out as a script that holds this file's text, so nothing here may import another file of the tests.

Where a tensor is sharded is said anew here, by `part` and `whole`, and not asked of the library that is tested.
"""

import contextlib
import copy
import inspect
import math
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group
from tp_invariant.core.elementwise import in_whole_vectors

LEARNING_RATE = 0.125


# --- shards ---------------------------------------------------------------------------------------------------------


def part(full, dim, rank, size, stride=1):
    """Rank `rank`'s part of `full`: of each of the `stride` stacked pieces along `dim`, the rank's share."""
    shares = full.tensor_split(stride * size, dim)
    return torch.cat([shares[piece * size + rank] for piece in range(stride)], dim)


def whole(parts, dim, stride=1):
    """The inverse of `part`, from all ranks' parts."""
    shares = [p.tensor_split(stride, dim) for p in parts]
    return torch.cat([share[piece] for piece in range(stride) for share in shares], dim)


_groups = {}  # of this rank's process, by the group of all ranks: a group is made once


def groups_of(world):
    """{name: tp_group}: all ranks; half of four ranks, or this rank by itself; none."""
    if world is None:
        return {"world": None, "half": None, "none": None}
    if world not in _groups:
        size, rank = dist.get_world_size(world), dist.get_rank(world)
        width = size // 2 if size % 2 == 0 else 1
        first = rank - rank % width
        ranks = dist.get_process_group_ranks(world)[first : first + width]
        _groups[world] = group_of(ranks, f"ranks {ranks} of the {size} of {world.group_name}")
    return {"world": world, "half": _groups[world], "none": None}


def group_of(ranks, name):
    """A process group that these ranks alone make.

    dist.new_group(.., use_local_synchronization=True) names it after how many groups a process has, which differs
    between the ranks of a pool: they would wait for each other under different names.
    """
    backend, rank = dist.Backend(dist.get_backend()), dist.get_rank()
    timeout = c10d._get_default_timeout(backend)
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(rank), ranks, backend, c10d._get_default_store(), c10d.GroupName(name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


# --- data -----------------------------------------------------------------------------------------------------------


class Data:
    """Tensors that depend on the seed and their name alone, rounded to the program's dtype."""

    def __init__(self, seed, dtype, values="normal", device="cpu"):
        self.seed, self.dtype, self.values, self.device = seed, getattr(torch, dtype), values, device
        self.at = ""  # which step and micro-batch

    def full(self, name, shape, scale=1.0, values="normal"):
        g = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        x = torch.randn(shape, generator=g)
        spread = 2 if self.dtype == torch.float16 else 6
        if values in ("wide", "nonfinite"):
            x = x * torch.exp2(torch.randint(-spread, spread + 1, tuple(shape), generator=g).float())
        if values == "sparse":  # zeros of both signs
            x = torch.where(torch.rand(shape, generator=g) < 0.7, x * 0.0, x)
        if values == "tiny":  # subnormal numbers
            x = x * (2.0**-20 if self.dtype == torch.float16 else 2.0**-130)
        x = x * scale
        if values == "nonfinite":
            which = torch.randint(0, 40, tuple(shape), generator=g)
            for number, value in enumerate((math.inf, -math.inf, math.nan, -0.0)):
                x = torch.where(which == number, value, x)
        return x.to(self.dtype)

    def full_parameter(self, name, shape, fan, center, rows):
        wide = "wide" if self.values == "wide" and center == 0 else "normal"
        full = self.full(name, shape, scale=fan**-0.5, values=wide) + center
        if rows is not None:  # the rest is the padding of a vocabulary
            full[rows:] = 0
        return full

    def full_ids(self, name, tokens, size, ignored=None):
        g = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        ids = torch.randint(0, size, tuple(tokens), generator=g)
        if ignored is not None:
            ids = torch.where(torch.rand(tuple(tokens), generator=g) < 0.3, ignored, ids)
        return ids.to(self.device)

    def ids(self, name, tokens, size, ignored=None):
        return self.full_ids(f"{name} {self.at}", tokens, size, ignored)

    def full_choice(self, name, tokens, experts, chosen):
        """(index, weights) [*tokens, chosen]: different experts for each token, of which some may have none."""
        g = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name} {self.at}".encode()))
        scores = torch.rand(*tokens, experts, generator=g) * torch.rand(experts, generator=g)
        return scores.argsort(-1, descending=True)[..., :chosen], torch.rand(*tokens, chosen, generator=g)


def restrided(x):
    """The same values with the strides of a transposed tensor."""
    if x.dim() < 2:
        return x
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def laid_out(x, layout):
    """(a leaf, x as a view of it): how the caller of a layer may hold its input."""
    if layout == "transposed" and x.dim() > 1:
        leaf = x.transpose(0, -1).contiguous()
        return leaf, lambda leaf: leaf.transpose(0, -1)
    if layout == "sliced":
        leaf = torch.stack([x, torch.full_like(x, 3.0)], -1).flatten(-2)
        return leaf, lambda leaf: leaf[..., ::2]
    if layout == "offset":
        leaf = torch.cat([torch.full_like(x[:1], 3.0), x])
        return leaf, lambda leaf: leaf[leaf.shape[0] - x.shape[0] :]
    if layout == "expanded" and x.shape[0]:
        leaf = x[:1].clone()
        return leaf, lambda leaf: leaf.expand(x.shape)
    return x.clone(), lambda leaf: leaf


# --- a model of this library's layers -------------------------------------------------------------------------------


class Run(Data):
    """One rank's model, trained for some steps; `results()` is everything that must not depend on the degree."""

    def __init__(self, world, seed, dtype, values="normal", device="cpu"):
        super().__init__(seed, dtype, values, device)
        self.groups = groups_of(world)
        self.world = world
        self.places, self.kept = [], []

    def group(self, name):
        return self.groups[name]

    def rank_and_size(self, name):
        group = self.groups.get(name)
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def local(self, full, over, dim, stride=1):
        rank, size = self.rank_and_size(over)
        return (full.clone() if dim is None or size == 1 else part(full, dim, rank, size, stride)).to(self.device)

    # inputs, parameters, outputs

    def input(self, name, tokens, features, layout="plain", over=None, dim=None, stride=1, grad=True):
        full = self.full(f"{name} {self.at}", (*tokens, features), values=self.values)
        leaf, view = laid_out(self.local(full, over, dim, stride), layout)
        leaf.requires_grad_(grad)
        place = (over, dim, stride) if layout == "plain" and dim is not None else None
        if place is None and dim is not None and self.rank_and_size(over)[1] > 1:
            raise ValueError("a sharded input has the plain layout")
        self.leaves.append((name, leaf, place))
        return view(leaf)

    def parameter(
        self, module, key, name, shape, *, over="none", dim=None, stride=1, fan=1, center=0.0, rows=None, frozen=False,
        main_grad=False, replace=None, fill=True, like=None,
    ):  # fmt: skip
        """Gives module.key its values; `like`: a parameter of this name is the same one, and has them."""
        if like is None and fill:
            full = self.full_parameter(name, shape, fan, center, rows)
            with torch.no_grad():
                getattr(module, key).copy_(self.local(full, over, dim, stride))
        old = getattr(module, key)
        if replace is not None:
            new = nn.Parameter(old.detach().clone())
            if replace == "delete":
                delattr(module, key)
            setattr(module, key, new)
        p = getattr(module, key)
        p.requires_grad_(not frozen)
        if main_grad:
            p.main_grad = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        if like is None:
            self.places.append((name, module, key, over, dim, stride, main_grad))

    def plain(self, name, features, center=0.0):
        """A parameter of no layer, whole on every rank."""
        holder = nn.Module()
        holder.p = nn.Parameter(self.full_parameter(name, (features,), 1, center, None).to(self.device))
        self.places.append((name, holder, "p", "none", None, 1, False))
        return holder.p

    def linear(self, name, in_features, out_features, bias):
        """The full nn.Linear that `from_linear` takes."""
        linear = nn.Linear(in_features, out_features, bias=bias, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            weight = self.full_parameter(f"{name}.weight", (out_features, in_features), in_features, 0.0, None)
            linear.weight.copy_(weight)
            if bias:
                linear.bias.copy_(self.full_parameter(f"{name}.bias", (out_features,), 1, 0.0, None))
        return linear

    def output(self, name, y, over=None, dim=None, stride=1, cotangent="random"):
        self.keep(f"{name} {self.at}", y, over, dim, stride)
        if not y.requires_grad:
            return
        shape = list(y.shape)
        if cotangent == "sum":  # what y.sum() hands back: one element, expanded
            grad = torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape)
        else:
            if dim is not None:
                shape[dim] *= self.rank_and_size(over)[1]
            full = self.full(f"cotangent of {name} {self.at}", shape, values="normal").to(y.dtype)
            grad = self.local(full, over, dim, stride)
            if cotangent == "restrided":
                grad = restrided(grad)
        self.outputs.append((y, grad))

    def keep(self, name, tensor, over=None, dim=None, stride=1):
        value = None if tensor is None else tensor.detach().clone(memory_format=torch.contiguous_format)
        if value is not None and value.is_floating_point():
            # a NaN is a NaN: which one torch's own elementwise operations make goes by an element's place on a CPU
            value.masked_fill_(value.isnan(), math.nan)
        size = self.rank_and_size(over)[1]
        self.kept.append((name, value, (over, dim, stride) if dim is not None and size > 1 else None))

    # what stands between layers

    def chosen(self, name, tokens, experts, chosen, over=None, dim=None):
        index, weights = self.full_choice(name, tokens, experts, chosen)
        weights = self.local(weights.to(self.dtype), over, dim).requires_grad_()
        self.leaves.append((name, weights, None if dim is None else (over, dim, 1)))
        return self.local(index, over, dim), weights

    def stored_over(self, name):
        """The group that stores experts, which one rank has, too: the norm has other bits without."""
        group = self.groups[name]
        return Group(None, 0, 1) if group is None else group

    def act(self, name, x):
        fn = ACTIVATIONS[name]
        # torch's own exp and tanh go by an element's place on a CPU; see the library's core/elementwise.py
        return in_whole_vectors(fn, x) if name in POSITION_DEPENDENT and tpi.is_tp_invariant_mode_enabled() else fn(x)

    def attention(self, q, k, v, heads, head_dim, over, **options):
        size = self.rank_and_size(over)[1]
        q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(-2, -3) for t in (q, k, v))
        assert q.shape[-3] * size == heads
        lead = q.dim() == 3
        q, k, v = (t.unsqueeze(0) if lead else t for t in (q, k, v))
        out = tpi.attention(q, k, v, **options).transpose(-2, -3).flatten(-2)
        return out.squeeze(0) if lead else out

    def add_bias(self, y, bias):
        return y if bias is None else y + bias

    def heads(self, norm, x, features, transposed):
        x = x.unflatten(-1, (-1, features))
        return (norm(x.transpose(1, 2)).transpose(1, 2) if transposed else norm(x)).flatten(-2)

    def checkpoint(self, layer, *args):
        return checkpoint(layer, *args, use_reentrant=False)

    def copied(self, layer):
        return copy.deepcopy(layer)

    def plain_norm(self, name, features):
        """torch's own norm, which sees this rank's tokens only: what no model may do in a sequence-parallel region."""
        norm = nn.LayerNorm(features, dtype=self.dtype, device=self.device)
        self.places += [(f"{name}.{key}", norm, key, "none", None, 1, False) for key in ("weight", "bias")]
        return norm

    # training

    def prepared(self, forward, parameters, micro_batches):
        """(a forward, what follows each backward, what follows the last one of a step)."""
        return forward, lambda: None, lambda: None

    def train(
        self, forward, *, steps=2, micro_batches=1, optimizer="sgd", max_norm=1.0, norm_type=2.0, twice=False,
        clip_over=None,
    ):  # fmt: skip
        """`clip_over`: the group to clip over, for a model whose parameters are all whole and carry none."""
        params = [(name, getattr(module, key), *place) for name, module, key, *place in self.places]
        forward, add, reduce = self.prepared(forward, [p for _, p, *_ in params], micro_batches)
        make = None
        for step in range(steps):
            for batch in range(micro_batches):
                self.at, self.leaves, self.outputs = f"step {step} batch {batch}", [], []
                forward()
                if self.outputs:
                    torch.autograd.backward(*map(list, zip(*self.outputs, strict=True)))
                for name, leaf, place in self.leaves:
                    self.keep(f"grad of {name} {self.at}", leaf.grad, *(place or ()))
                add()
            reduce()
            for name, p, over, dim, stride, main_grad in params:
                if main_grad:
                    self.keep(f"main_grad of {name} step {step}", p.main_grad, over, dim, stride)
                    if p.requires_grad:
                        p.grad = p.main_grad.to(p.dtype, copy=True)
                    p.main_grad.zero_()
                self.keep(f"grad of {name} step {step}", p.grad, over, dim, stride)
            tensors = [p for _, p, *_ in params]
            norm = clip(
                tensors + tensors[:1] if twice else tensors, max_norm, norm_type, self.world, clip_over is not None
            )
            self.keep(f"norm step {step}", norm)
            for name, p, over, dim, stride, _ in params:
                self.keep(f"clipped grad of {name} step {step}", p.grad, over, dim, stride)
            make = make or OPTIMIZERS[optimizer]([p for p in tensors if p.requires_grad])
            make()
            for name, p, over, dim, stride, _ in params:
                self.keep(f"{name} after step {step}", p, over, dim, stride)
                p.grad = None

    def results(self):
        """{name: tensor on the CPU}, each in its full shape."""
        found = {name: value for name, value, place in self.kept if place is None}
        for over in ("world", "half"):
            mine = [(n, v, place) for n, v, place in self.kept if place and place[0] == over and v is not None]
            if not mine:
                continue
            flat = torch.cat([v.flatten().view(torch.uint8) for _, v, _ in mine])
            everyone = [torch.empty_like(flat) for _ in range(self.rank_and_size(over)[1])]
            dist.all_gather(everyone, flat, group=self.groups[over])
            pieces = [f.split([v.nbytes for _, v, _ in mine]) for f in everyone]
            for i, (name, v, (_, dim, stride)) in enumerate(mine):
                parts = [rank[i].clone().view(v.dtype).view(v.shape) for rank in pieces]
                found[name] = whole(parts, dim, stride)
        found |= {name: value for name, value, place in self.kept if place is not None and value is None}
        return {name: None if value is None else value.cpu() for name, value in found.items()}


def clip(parameters, max_norm, norm_type, world, told=False):
    """clip_grad_norm_, told the group of all ranks where it has to be told one."""
    told = told or inspect.signature(tpi.clip_grad_norm_).parameters["tp_group"].default is inspect.Parameter.empty
    return tpi.clip_grad_norm_(parameters, max_norm, norm_type=norm_type, **(dict(tp_group=world) if told else {}))


def run(world, program, *, mode=True, **options):
    """program(r) on a new Run -> its results."""
    with tpi.set_tp_invariant_mode(mode):
        r = Run(world, **options)
        program(r)
        return r.results()


# --- the same model of torch's functions ----------------------------------------------------------------------------


class FusedAttention(torch.autograd.Function):
    """softmax(scores) @ v with the backward of flash attention, which reads what forward returned, rounded.

    The softmax's gradient is weights * (dweights - delta). Where all that a row sees is alike, the two are nearly
    equal, and delta = sum(dout * out) has the error of the rounded output: that of every fused attention (Dao et al.
    2022, "FlashAttention", algorithm 4), and many times that of a backward which keeps the exact output.
    """

    @staticmethod
    def forward(ctx, scores, v, dtype):
        weights = scores.softmax(-1)
        out = (weights @ v).to(dtype)
        ctx.save_for_backward(weights, v, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        weights, v, out = ctx.saved_tensors
        dout, out = dout.to(weights.dtype), out.to(weights.dtype)
        delta = (dout * out).sum(-1, keepdim=True)
        return weights * (dout @ v.transpose(-1, -2) - delta), weights.transpose(-1, -2) @ dout, None


class Reference(Data):
    """The unsharded model in float64, or with what each operation returns rounded to the program's dtype.

    The second is what torch's own layers do in that dtype: products and sums in fp32, one rounding at the end.
    """

    def __init__(self, seed, dtype, values="normal", exact=True):
        super().__init__(seed, dtype, values)
        self.exact = exact
        self.hold = torch.float64 if exact else self.dtype
        self.compute = torch.float64 if exact else torch.float32
        self.kept, self.parameters = {}, {}

    def input(self, name, tokens, features, layout="plain", grad=True):
        leaf, view = laid_out(self.full(f"{name} {self.at}", (*tokens, features), values=self.values), layout)
        leaf = leaf.to(self.hold).requires_grad_(grad)
        self.leaves.append((name, leaf))
        return view(leaf)

    def parameter(self, name, shape, fan=1, center=0.0, rows=None, frozen=False, like=None):
        full = self.full_parameter(name, shape, fan, center, rows)
        p = full.to(self.hold).requires_grad_(not frozen)
        self.parameters[name] = self.parameters[like] if like is not None else p
        return self.parameters[name]

    def plain(self, name, features, center=0.0):
        return self.parameter(name, (features,), center=center)

    def output(self, name, y, cotangent="random"):
        self.kept[f"{name} {self.at}"] = y.detach()
        if y.requires_grad:
            grad = torch.ones_like(y)
            if cotangent != "sum":
                grad = self.full(f"cotangent of {name} {self.at}", y.shape, values="normal").to(y.dtype)
            self.outputs.append((y, grad))

    def up(self, *tensors):
        return [None if t is None else t.to(self.compute) for t in tensors]

    def call(self, x, weight, bias=None):
        x, weight, bias = self.up(x, weight, bias)
        return F.linear(x, weight, bias).to(self.hold)

    def norm(self, x, weight, bias, eps, rms, zero_centered):
        size = (x.shape[-1],)
        x, weight, bias = self.up(x, weight, bias)
        weight = weight + 1 if zero_centered else weight
        y = F.rms_norm(x, size, weight, eps) if rms else F.layer_norm(x, size, weight, bias, eps)
        return (y + bias if rms and bias is not None else y).to(self.hold)

    def heads(self, x, features, *norm):
        return self.norm(x.unflatten(-1, (-1, features)), *norm).flatten(-2)

    def embedding(self, ids, weight, padding_idx):
        return F.embedding(ids, weight, padding_idx)

    def chosen(self, name, tokens, experts, chosen):
        index, weights = self.full_choice(name, tokens, experts, chosen)
        weights = weights.to(self.dtype).to(self.hold).requires_grad_()
        self.leaves.append((name, weights))
        return index, weights

    def experts(
        self, x, index, weights, up, down, up_bias=None, down_bias=None, *, gated, interleaved, transposed, activation
    ):  # fmt: skip
        y = torch.zeros(x.shape, dtype=self.compute)
        for expert in range(len(up)):
            w = [None if t is None else t[expert] for t in (up, up_bias, down, down_bias)]
            if transposed:
                w[0], w[2] = w[0].t(), w[2].t()
            h = self.call(x, *w[:2])
            if gated:
                gate, up_half = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
                h = ACTIVATIONS[activation](gate.to(self.compute)) * up_half.to(self.compute)
            else:
                h = ACTIVATIONS[activation](h.to(self.compute))
            h = self.call(h.to(self.hold), *w[2:])
            weight = (weights.to(self.compute) * (index == expert)).sum(-1, keepdim=True)
            # a token of another expert: nothing, and no NaN of its product
            y = y + torch.where(weight != 0, h.to(self.compute) * weight, 0.0)
        return y.to(self.hold)

    def act(self, name, x):
        return ACTIVATIONS[name](x)  # torch rounds once; its backward reads what tanh and sigmoid returned, rounded

    def attention(self, q, k, v, head_dim, causal, window=None, softcap=None):
        q, k, v = (t.to(self.compute).unflatten(-1, (-1, head_dim)).transpose(-2, -3) for t in (q, k, v))
        group = q.shape[-3] // k.shape[-3]
        k, v = (t.repeat_interleave(group, -3) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(head_dim)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        s = scores.shape[-1]
        i, j = torch.arange(s).unsqueeze(1), torch.arange(s)
        seen = (j <= i) & (j > i - (window or s + 1)) if causal else torch.ones(s, s, dtype=torch.bool)
        out = FusedAttention.apply(scores.masked_fill(~seen, -math.inf), v, self.hold)
        return out.transpose(-2, -3).flatten(-2)

    def cross_entropy(self, logits, target, size, label_smoothing, ignore_index, reduction, z_loss):
        x = logits.to(self.compute)[..., :size].flatten(0, -2)
        ids = target.flatten()
        loss = F.cross_entropy(x, ids, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction="none")
        loss = loss + torch.where(ids == ignore_index, 0.0, z_loss * x.logsumexp(-1).square())
        if reduction == "none":
            return loss.view(target.shape)
        return loss.sum() / (ids != ignore_index).sum() if reduction == "mean" else loss.sum()

    def train(self, forward, *, micro_batches=1, max_norm=1.0, norm_type=2.0, **_):
        """The first step, up to the clipped gradients: what follows would measure the optimizer."""
        with torch.device("cpu"):
            for batch in range(micro_batches):
                self.at, self.leaves, self.outputs = f"step 0 batch {batch}", [], []
                forward()
                if self.outputs:
                    torch.autograd.backward(*map(list, zip(*self.outputs, strict=True)))
                self.kept |= {f"grad of {n} {self.at}": leaf.grad for n, leaf in self.leaves}
        own = {id(p): name for name, p in reversed(self.parameters.items())}  # a tied one under its first name
        grads = {name: self.parameters[name].grad for name in own.values()}
        given = [g.double().flatten() for g in grads.values() if g is not None]
        norm = torch.linalg.vector_norm(torch.cat([torch.zeros(1, dtype=torch.float64), *given]), norm_type)
        self.kept |= {f"grad of {name} step 0": g for name, g in grads.items()}
        self.kept["norm step 0"] = norm
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, g in grads.items():
            self.kept[f"clipped grad of {name} step 0"] = None if g is None else (g.double() * factor).to(self.hold)


def refer(program, **options):
    """program(o) on a new Reference -> its results."""
    o = Reference(**options)
    program(o)
    return o.kept


# --- functions ------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": torch.relu,
    "abs": torch.abs,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.25),
    "double": lambda x: x * 2.0,
    "hardtanh": F.hardtanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
POSITION_DEPENDENT = ("gelu", "gelu_tanh", "silu", "tanh", "sigmoid")


def _sgd(params):
    """In two operations, each rounded by itself: no element's bits depend on its place."""

    def step():
        with torch.no_grad():
            for p in params:
                if p.grad is not None:
                    p.sub_(p.grad * LEARNING_RATE)

    return step


def _adamw(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=False).step if params else lambda: None


def _momentum(params):
    return torch.optim.SGD(params, lr=LEARNING_RATE, momentum=0.5, foreach=False).step if params else lambda: None


OPTIMIZERS = {"sgd": _sgd, "adamw": _adamw, "momentum": _momentum}


@contextlib.contextmanager
def settings(keep=0, ahead=True, check=False):
    """Sets the scheduler's switches and TP_INVARIANT_CHECK, and restores them afterwards."""
    import os

    from tp_invariant.owners import weight_cache

    before = weight_cache.keep, weight_cache.ahead, os.environ.get("TP_INVARIANT_CHECK")
    weight_cache.keep, weight_cache.ahead = keep, ahead
    os.environ["TP_INVARIANT_CHECK"] = "1" if check else "0"
    try:
        yield
    finally:
        weight_cache.keep, weight_cache.ahead = before[:2]
        weight_cache.clear()
        if before[2] is None:
            del os.environ["TP_INVARIANT_CHECK"]
        else:
            os.environ["TP_INVARIANT_CHECK"] = before[2]
