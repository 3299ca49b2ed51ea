"""What users compile, with inductor: blocks of layers with norms, activations, attention and residuals between them.

Three claims. Compiled with the mode on, a rank's results equal those of TP=1 compiled: loss, output, gradients,
parameters after optimizer steps. At other lengths and with the mode off the same code stays right. All results are as
near to float64 as eager ones. The bits of the layers are those of eager mode (test_compile.py); the bits of the code
between them are inductor's.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from cpu_compiler import needs_compiler
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core.bits import leaves
from tp_invariant.diagnostics.verify_case import error
from tp_invariant.examples.train_in_one_graph import Model, make_parser
from tp_invariant.functional.regions import gather_sequence, scatter_sequence
from tp_invariant.testing import assert_bitwise_equal, digest, wide_randn

VOCABULARY, HIDDEN, HEADS, KV_HEADS = 72, 64, 4, 2
ON, OFF = True, False


class Net(nn.Module):
    """Every kind of layer in the two blocks of a transformer, with the usual plain torch code between them."""

    def __init__(self, tp_group: Any, sequence_parallel: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel
        where = dict(dtype=dtype, device=device)
        both = dict(tp_group=tp_group, sequence_parallel=sequence_parallel, sequence_dim=1, **where)
        column, row = dict(parallel_mode="column", **both), dict(parallel_mode="row", **both)
        self.embedding = tpi.VocabParallelEmbedding(VOCABULARY, HIDDEN, tp_group=tp_group, **where)
        self.first = nn.LayerNorm(HIDDEN, **where)  # whole, before what enters the sharded region
        self.norm = tpi.ParallelNorm(HIDDEN, **both)
        self.sizes = [heads * (HIDDEN // HEADS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.qkv = tpi.Linear(HIDDEN, sum(self.sizes), bias=False, partition_sizes=self.sizes, **column)
        self.q_norm = tpi.ParallelNorm(HIDDEN // HEADS, heads=HEADS, heads_dim=2, tp_group=tp_group, **where)
        self.out = tpi.Linear(HIDDEN, HIDDEN, **row)
        self.up = tpi.LayerNormLinear(HIDDEN, 256, normalization="RMSNorm", partition_stride=2, **column)
        self.down = tpi.Linear(128, HIDDEN, bias=False, **row)
        self.last = nn.LayerNorm(HIDDEN, **where)
        self.head = tpi.Linear(HIDDEN, VOCABULARY, bias=False, parallel_mode="column", tp_group=tp_group, **where)

    def attend(self, x: Tensor) -> Tensor:
        pieces = self.qkv(self.norm(x)).split([size // self.qkv.group.size for size in self.sizes], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, HIDDEN // HEADS)) for t in pieces)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), k, v))
        attention = F.scaled_dot_product_attention if q.dtype == torch.float64 else tpi.attention
        kind = dict(is_causal=True, enable_gqa=True) if q.dtype == torch.float64 else dict(causal=True)
        return self.out(attention(q, k, v, **kind).transpose(1, 2).flatten(-2))

    def forward(self, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.embedding(ids))
        if self.sequence_parallel:
            x = scatter_sequence(x, self.tp_group, 1)
        x = x + self.attend(x)
        gate, up = self.up(x).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        if self.sequence_parallel:
            x = gather_sequence(x, self.tp_group, 1)
        x = self.last(x)
        logits = self.head(x)
        if logits.dtype == torch.float64:
            return F.cross_entropy(logits.flatten(0, 1), target.flatten()), x
        return tpi.vocab_parallel_cross_entropy(logits, target, tp_group=self.tp_group), x


def train(
    tp_group: Any,
    sequence_parallel: bool,
    compiled: str | None,
    modes: tuple[bool, ...],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> list[Any]:
    """Loss, output, gradients and the parameters after an optimizer step, for steps of two lengths; full tensors.

    `options`: `lengths` other than these, and torch.compile's `mode`.

    With dynamic, another length in the same mode must not compile again.
    """
    torch.compiler.reset()
    lengths, compile_mode = (8, 12), None
    if options is not None:
        lengths, compile_mode = options.get("lengths", lengths), options.get("mode")
    # layer by layer, all Linears share one code, in both modes and lengths; named so, since a rank is sent no module
    setattr(importlib.import_module("torch._dynamo.config"), "recompile_limit", 64)  # noqa: B010
    # torch 2.11 takes the lengths that a graph keeps for tensors whose memory backward may use
    donates = torch.__version__ >= "2.13" or not dynamic
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", donates)  # noqa: B010
    if device == "cuda":
        settings = importlib.import_module("torch._inductor.config")
        setattr(settings, "compile_threads", 8)  # noqa: B010
        # otherwise it measures which of several kernels is fastest, whose sums may have other orders
        setattr(settings, "deterministic", True)  # noqa: B010
    model = Net(tp_group, sequence_parallel, dtype, device)
    with torch.no_grad():
        for i, (_, p, spec) in enumerate(tpi.parameters.named_shard_specs(model)):
            full = spec.full(p)
            values = wide_randn(*full.shape, generator=torch.Generator().manual_seed(i), spread=2)
            p.copy_(spec.local((values * 0.2 + (1 if p.dim() == 1 else 0)).to(full)))
    call: Any = model
    if compiled == "model":
        call = torch.compile(model, fullgraph=True, dynamic=dynamic, mode=compile_mode)
    elif compiled == "layers":  # each by itself, and nothing else
        for child in model.children():
            if not isinstance(child, nn.LayerNorm):
                child.compile(fullgraph=True, dynamic=dynamic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    results = []
    for step, mode in enumerate(modes):
        g = torch.Generator().manual_seed(step)
        ids, target = (
            torch.randint(0, VOCABULARY, (2, lengths[step % len(lengths)]), generator=g).to(device) for _ in range(2)
        )
        target[0, 0] = -100
        optimizer.zero_grad()
        recompiles = "fail_on_recompile" if dynamic and step and mode == modes[step - 1] else "default"
        with tpi.set_tp_invariant_mode(mode), torch.compiler.set_stance(recompiles):
            loss, x = call(ids, target)
            (loss + x.square().mean()).backward()
        grads = {name: None if g is None else g.cpu() for name, g in testing.full_grads(model).items()}
        optimizer.step()
        after = {name: p.detach().cpu() for name, p in testing.full_parameters(model).items()}
        results.append((loss.detach().cpu(), x.detach().cpu(), grads, after))
    return results


def check_right(got: list[Any], exact: list[Any], bound: float) -> None:
    for (loss, x, grads, after), (exact_loss, exact_x, exact_grads, exact_after) in zip(got, exact, strict=True):
        assert error(loss, exact_loss.double()) < bound and error(x, exact_x.double()) < bound
        assert grads.keys() == exact_grads.keys()
        for name in grads:
            assert error(grads[name], exact_grads[name].double()) < 10 * bound, name
            assert error(after[name], exact_after[name].double()) < 10 * bound, name


@needs_compiler
@pytest.mark.more
def test_a_model():
    """One compilation for both lengths."""
    exact = train(None, True, None, (OFF, OFF), torch.float64)
    arguments = (True, "model", (ON, ON), torch.float32, "cpu", True)
    (whole,) = run_ranks(train, 1, *arguments)
    check_right(whole, exact, 1e-5)
    for got in run_ranks(train, 2, *arguments):
        assert_bitwise_equal(got, whole)


# --- small models ----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """The two shortest programs in which inductor makes C++ loops before a layer of several ranks."""

    def __init__(self, tp_group: Any) -> None:
        super().__init__()
        column, row = (dict(parallel_mode=mode, tp_group=tp_group) for mode in ("column", "row"))
        self.norm, self.after = nn.LayerNorm(96), tpi.Linear(96, 48, gather_output=True, **column)
        self.mlp = nn.Sequential(tpi.Linear(48, 80, **column), nn.GELU(), tpi.Linear(80, 48, **row))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.after(self.norm(x)))


def small(tp_group: Any, compiled: bool, modes: tuple[bool, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Small(tp_group).to(dtype)
    call = torch.compile(model, fullgraph=True) if compiled else model
    results = []
    for mode in modes:
        model.zero_grad()
        x = wide_randn(6, 96, generator=torch.Generator().manual_seed(1), spread=2).to(dtype).requires_grad_()
        with tpi.set_tp_invariant_mode(mode):
            y = call(x)
            y.square().sum().backward()
        results.append((y.detach(), x.grad, testing.full_grads(model)))
    return results


@needs_compiler
@pytest.mark.more
def test_rounding_where_several_ranks_would_gather():
    """On one rank too x is rounded there, and so is its gradient, and who writes to the result leaves x alone. Without
    the gather inductor rounds once, at the end."""

    def block(x: Tensor, y: Tensor, w: Tensor, gather: Any) -> tuple[Tensor, Tensor]:
        s = x + y
        part = gather(s)
        out = part.float() * w
        part.zero_()
        return out, s

    def results(call: Any, gather: Any) -> list[Tensor]:
        x, y, w = (wide_randn(2, 8, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
        x, y = x.bfloat16().requires_grad_(), y.bfloat16()
        out, s = call(x, y, w, gather)
        (out.sum() + s.float().sum()).backward()
        return [out.detach(), x.grad, s.detach()]

    torch.compiler.reset()
    compiled, gather = torch.compile(block, fullgraph=True), functools.partial(gather_sequence, tp_group=None)
    right = results(block, gather)
    assert_bitwise_equal(results(compiled, gather), right)
    control = results(compiled, torch.clone)
    assert all((one != other).any() for one, other in zip(control[:2], right[:2], strict=True))


@needs_compiler
def test_small_models():
    """With the mode on TP=2 has the bits of TP=1, off it has others, and all are right."""
    (exact,) = small(None, False, (OFF,), torch.float64)
    whole = run_ranks(small, 1, True, (ON, OFF))[0]
    for got in run_ranks(small, 2, True, (ON, OFF)):
        assert_bitwise_equal(got[0], whole[0])
        assert digest(got[1]) != digest(whole[1])
        for y, dx, grads in (*got, *whole):
            assert error(y, exact[0]) < 1e-5 and error(dx, exact[1]) < 1e-5
            assert max(error(grads[name], exact[2][name]) for name in grads) < 1e-5


# --- a Hugging Face layer -------------------------------------------------------------------------------------------


def train_hugging_face(
    tp_group: Any,
    sequence_parallel: bool,
    compiled: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    batches: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Two steps of a Qwen3 whose decoder layers are compiled, each as one graph; odd batches have padding."""
    torch.compiler.reset()
    with tpi.set_tp_invariant_mode(True):
        model = tpi.parallelize(
            hf_models.build("qwen3", dtype, num_hidden_layers=1).to(device),
            tp_group,
            sequence_parallel=sequence_parallel,
        )
        if compiled:
            for layer in model.model.layers:
                layer.compile(fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results: dict[str, Any] = {}
        for step, number in enumerate(batches):
            output = model(**{name: t.to(device) for name, t in hf_models.batch(number).items()})
            optimizer.zero_grad()
            output.loss.backward()
            if step == 0:
                results["logits"] = output.logits.detach().cpu()
                results["grads"] = {name: g.cpu() for name, g in testing.full_grads(model).items()}
            optimizer.step()
            results[f"loss {step}"] = output.loss.detach().cpu()
        return results


@needs_compiler
@pytest.mark.more
def test_a_hugging_face_layer():
    """Both batches have padding, so that each degree compiles once; `test_a_model` covers attention without padding."""
    pytest.importorskip("transformers")
    same = torch.float32, "cpu", (1, 3)
    eager = train_hugging_face(None, False, False, *same)
    whole = run_ranks(train_hugging_face, 1, False, True, *same)[0]
    for (name, got), (_, expected) in zip(leaves(whole), leaves(eager), strict=True):
        assert error(got, expected.double()) < 1e-4, name
    for got in run_ranks(train_hugging_face, 2, True, True, *same):
        assert_bitwise_equal(got, whole)


# --- on GPUs --------------------------------------------------------------------------------------------------------

# Nearly all of their time is inductor's: each length, mode and program is compiled once, and no more of them than show
# something. Kernels are compiled by several processes, once these have started.
DEGREES = pytest.mark.parametrize("degree, sequence_parallel", ((1, False), (2, False), (2, True)))


def on_gpus(degree: int) -> Any:
    if degree > testing.gpu_ranks():
        pytest.skip(f"needs {degree} GPUs")
    return functools.partial(testing.run_ranks, device="cuda")


@pytest.mark.gpu
@DEGREES
def test_on_gpus(degree, sequence_parallel):
    """The model as one graph for all lengths, and as one for this length alone.

    Other degrees are held to float64 and not to TP=1's bits: here inductor picks the order of its own reductions by the
    sizes that it is given.
    """
    ranks = on_gpus(degree)
    exact = train(None, sequence_parallel, None, (OFF,) * 2, torch.float64)
    for dynamic, modes in ((None, (ON,)), (True, (ON, ON))):
        for got in ranks(train, degree, sequence_parallel, "model", modes, torch.float32, "cuda", dynamic):
            check_right(got, exact[: len(modes)], 1e-4)


@pytest.mark.gpu
@DEGREES
def test_layers_on_gpus(degree, sequence_parallel):
    """Compiled layer by layer all bits are those of eager layers at TP=1, and with the mode off they are not."""
    ranks = on_gpus(degree)
    (eager,) = ranks(train, 1, sequence_parallel, None, (ON, OFF), torch.float32, "cuda")
    for got in ranks(train, degree, sequence_parallel, "layers", (ON, OFF), torch.float32, "cuda"):
        assert_bitwise_equal(got[0], eager[0])
        assert degree == 1 or digest(got[1]) != digest(eager[1])


@pytest.mark.gpu
@pytest.mark.parametrize("degree, sequence_parallel", ((1, False), (2, True)))
def test_a_hugging_face_layer_on_gpus(degree, sequence_parallel):
    pytest.importorskip("transformers")
    ranks, same = on_gpus(degree), (torch.float32, "cuda", (1, 3))
    (alone,) = ranks(train_hugging_face, 1, sequence_parallel, False, *same)
    for got in ranks(train_hugging_face, degree, sequence_parallel, True, *same):
        for (name, value), (_, expected) in zip(leaves(got), leaves(alone), strict=True):
            assert error(value, expected.double()) < 1e-3, name


@pytest.mark.gpu
def test_cuda_graphs_that_torch_makes_of_one_rank():
    """mode="reduce-overhead": first calls warm up, then record, then replay, always with the bits of mode="default"."""
    ranks = on_gpus(1)
    (plain,) = ranks(train, 1, False, "model", (ON,) * 5, torch.float32, "cuda", None, dict(lengths=(8,)))
    options = dict(lengths=(8,), mode="reduce-overhead")
    (graphed,) = ranks(train, 1, False, "model", (ON,) * 5, torch.float32, "cuda", None, options)
    assert_bitwise_equal(graphed, plain)


def in_one_graph(tp_group: Any, mode: str | None, on: bool, device: str) -> list[Any]:
    """Losses and parameters of six steps. After four of them one rank alone gets other addresses for its parameters, so
    that it records again what the other replays."""
    torch.compiler.reset()
    setattr(importlib.import_module("torch._inductor.config"), "deterministic", True)  # noqa: B010
    torch.manual_seed(0)
    options = make_parser().parse_args(["--layers", "1"])
    model = Model(options, tp_group, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    call = model if mode is None else torch.compile(model, mode=mode, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    with tpi.set_tp_invariant_mode(on):
        for step in range(6):
            if step == 4 and tp_group.rank() == tp_group.size() - 1:
                for p in model.parameters():
                    p.data = p.data.clone()
            ids = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(step)).to(device)
            loss = call(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
            losses.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return [losses, {name: p.detach().cpu() for name, p in testing.full_parameters(model).items()}]


@pytest.mark.gpu
def test_cuda_graphs_that_torch_makes_of_several_ranks():
    """The bits of mode="default", at two ranks and at one; also where ranks do not record in the same steps."""
    ranks = on_gpus(2)
    (whole,) = ranks(in_one_graph, 1, "default", True, "cuda")
    for mode in ("default", "reduce-overhead"):
        for got in ranks(in_one_graph, 2, mode, True, "cuda"):
            assert_bitwise_equal(got, whole)
    for got in ranks(in_one_graph, 2, None, False, "cuda"):
        assert digest(got) != digest(whole)
