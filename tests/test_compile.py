"""torch.compile(fullgraph=True): the same bits as eager mode, forward and backward, at every degree."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import more
from compiled_steps import (
    checkpointed,
    clipped,
    compiled_backward,
    compiled_steps,
    in_cuda_graphs,
    loss_over_a_mesh,
)
from cpu_compiler import needs_compiler
from functorch.compile import make_boxed_func
from layer_cases import Case, assert_cases_invariant
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.diagnostics.verify_case import error
from tp_invariant.functional.regions import gather_sequence
from tp_invariant.gemm import gemm
from tp_invariant.kernels.gemm.reference import matmul
from tp_invariant.testing import assert_bitwise_equal, digest, wide_randn

ON_ON_OFF = (True, True, False)


# --- each layer -----------------------------------------------------------------------------------------------------

BASE = Case("column", 144, 48, (12, 2), backend="aot_eager")
SP = BASE.with_(sequence_parallel=True)
ROW = dict(parallel_mode="row", in_features=144, out_features=40)
CASES = [
    BASE.with_(parallel_mode=None, sequence_parallel=True),
    SP.with_(stride=2, late_stride=True, return_bias=True),
    BASE.with_(gather_output=True, return_bias=True),
    SP.with_(**ROW, tokens=(2, 12), sequence_dim=1, owner_map="cols"),
    BASE.with_(**ROW, input_is_parallel=False, return_bias=True, owner_map="rows"),
    SP.with_(norm="LayerNorm", tokens=(3, 32, 2), sequence_dim=1, return_norm=True, return_norm_gathered=True),
    BASE.with_(norm="RMSNorm", zero_centered=True, bias=False, return_norm=True),
]


@pytest.mark.parametrize("degree", (more(1), 2))
def test_layers(degree):
    assert_cases_invariant(CASES, degree)


# --- a whole model --------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Every kind of layer; q and k are independent of each other, and so are their gradients."""

    def __init__(self, tp_group: Any, sequence_parallel: bool, dtype: torch.dtype = torch.float32, device="cpu"):
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel
        both = dict(tp_group=tp_group, sequence_parallel=sequence_parallel, sequence_dim=1, dtype=dtype, device=device)
        column, row = dict(parallel_mode="column", **both), dict(parallel_mode="row", **both)
        self.embedding = tpi.VocabParallelEmbedding(72, 96, pad_vocab_to_multiple_of=16, **both)
        self.norm = tpi.ParallelNorm(96, **both)
        self.q, self.k = tpi.Linear(96, 128, **column), tpi.Linear(96, 128, bias=False, **column)
        of_heads = {name: both[name] for name in ("tp_group", "dtype", "device")}
        self.q_norm = tpi.ParallelNorm(16, heads=8, heads_dim=2, **of_heads)
        self.down = tpi.Linear(128, 96, **row)
        self.up = tpi.LayerNormLinear(96, 256, normalization="RMSNorm", partition_stride=2, **column)
        self.fc2 = tpi.Linear(128, 96, bias=False, **row)
        self.head = tpi.Linear(96, 80, bias=False, **column)

    def forward(self, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        h = self.norm(x)
        q, k = self.q(h).unflatten(-1, (-1, 16)), self.k(h).unflatten(-1, (-1, 16))
        x = x + self.down((self.q_norm(q) * k).flatten(-2))
        gate, up = self.up(x).chunk(2, dim=-1)
        x = x + self.fc2(gate * up)
        logits = self.head(x)
        if logits.dtype == torch.float64:  # the reference
            rows, ids = logits[..., :72].flatten(0, 1), target.flatten()
            loss = F.cross_entropy(rows, ids, label_smoothing=0.1) + 0.01 * rows[ids >= 0].logsumexp(1).square().mean()
        else:
            loss = tpi.vocab_parallel_cross_entropy(
                logits, target, tp_group=self.tp_group, vocab_size=72, label_smoothing=0.1, z_loss=0.01
            )
        return loss, x if not self.sequence_parallel else gather_sequence(x, self.tp_group, 1)


def steps(
    tp_group: Any,
    sequence_parallel: bool,
    backend: str | None,
    modes: tuple[bool, ...] = (True, True),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Any]:
    """Losses, outputs and full gradients of one step for each mode; the steps have different lengths."""
    torch.manual_seed(0)
    model = Model(tp_group, sequence_parallel, dtype, device)
    with torch.no_grad():
        for i, (_, p, spec) in enumerate(tpi.parameters.named_shard_specs(model)):
            full = spec.full(p)
            p.copy_(spec.local(wide_randn(*full.shape, generator=torch.Generator().manual_seed(i), spread=3).to(full)))
    call = model
    if backend:
        torch.compiler.reset()  # code compiled for other cases counts towards its limit
        call = torch.compile(model, backend=backend, fullgraph=True)
    results = []
    for step, mode in enumerate(modes):
        g = torch.Generator().manual_seed(step)
        ids, target = (torch.randint(0, 72, (2, (8, 12, 4)[step % 3]), generator=g).to(device) for _ in range(2))
        target[0, 0] = -100
        model.zero_grad()
        with tpi.set_tp_invariant_mode(mode):
            loss, x = call(ids, target)
            (loss + x.square().mean()).backward()
        results.append((loss.detach().cpu(), x.detach().cpu(), testing.full_grads(model)))
    return results


@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_model(sequence_parallel):
    """On, on with another length, off: with the mode on the bits of eager TP=1; with it off, of no other degree.

    Of the two ways that ranks hold tokens, one is compiled with the mode off too.
    """
    modes = ON_ON_OFF if sequence_parallel else (True, True)
    *expected, last = steps(None, sequence_parallel, None, ON_ON_OFF)
    exact = [*steps(None, sequence_parallel, None, (False, False), torch.float64), last][: len(modes)]
    for got in run_ranks(steps, 2, sequence_parallel, "aot_eager", modes):
        assert_bitwise_equal(got[:2], expected)
        assert modes[-1] or digest(got[2]) != digest(last)
        for (loss, x, grads), (exact_loss, exact_x, exact_grads) in zip(got, exact, strict=True):
            assert error(loss, exact_loss.double()) < 1e-4 and error(x, exact_x.double()) < 1e-4
            assert max(error(grads[name], exact_grads[name].double()) for name in grads) < 1e-3


class Pair(nn.Module):
    """Two layers that are independent of each other, each with collectives in forward and backward."""

    def __init__(self, tp_group: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options = dict(parallel_mode="column", tp_group=tp_group, sequence_parallel=True, device=device, dtype=dtype)
        torch.manual_seed(0)
        self.a, self.b = (tpi.Linear(96, 64, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


def pair_grads(tp_group: Any, backend: str | None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    group = resolve_group(tp_group)
    pair = Pair(tp_group, device, dtype)
    torch.compiler.reset()
    call = torch.compile(pair, backend=backend, fullgraph=True, dynamic=True) if backend else pair
    results = []
    for tokens in (8, 16):
        x = wide_randn(tokens, 96, generator=torch.Generator().manual_seed(1), spread=3).to(device, dtype)
        x = x.chunk(group.size)[group.rank].clone().requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            y = call(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append((gather_dim(y.detach(), 1, group).cpu(), gather_dim(x.grad, 0, group).cpu()))
    return results, {name: None if g is None else g.cpu() for name, g in testing.full_grads(pair).items()}


@pytest.mark.more
def test_inductor_with_independent_layers():
    expected = pair_grads(None, None)
    for degree in (1, 2):
        for got in run_ranks(pair_grads, degree, "inductor"):
            assert_bitwise_equal(got, expected)


def ordered_ops(tp_group: Any) -> tuple[list[str], list[str]]:
    """The names of the ops in the forward and backward graphs that depend on the op before them, in order."""
    graphs: list[list[str]] = []

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        chain, token = [], None
        for node in module.graph.nodes:
            if node.target is torch.ops.higher_order.with_effects:
                assert token is None or node.args[0].args[0] is token
                token = node
                chain.append(node.args[1].name())
        graphs.append(chain)
        return make_boxed_func(module.forward)

    pair = Pair(tp_group)
    torch.compiler.reset()
    call = torch.compile(pair, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)
    call(torch.ones(4, 96, requires_grad=True)).sum().backward()
    forward, backward = graphs
    return forward, backward


def test_calls_of_several_ranks_are_ordered():
    """A token passes from each op that communicates to the next; at TP=1 no op waits."""
    with tpi.set_tp_invariant_mode(True):
        assert ordered_ops(None) == ([], [])
        for forward, backward in run_ranks(ordered_ops, 2):
            assert forward == ["tp_invariant::check_agreement", "tp_invariant::column_linear_ranks"] * 2
            assert backward == ["tp_invariant::column_linear_ranks_backward"] * 2


def test_every_op_has_an_argument_on_its_device():
    """Without a tensor argument inductor places an op on the wrong device (see as_runtime_op)."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("tp_invariant::")]
    assert len(schemas) > 20
    for schema in schemas:
        assert any(str(a.type) in ("Tensor", "List[Tensor]") for a in schema.arguments), schema


# --- the gate -------------------------------------------------------------------------------------------------------


def test_compiled_code_follows_the_mode(monkeypatch):
    """Set by the call and by either variable; each change takes effect at the next call."""
    layer, x = tpi.Linear(4096, 8), wide_randn(4, 4096, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    seen = {}
    for mode in (True, False):
        with tpi.set_tp_invariant_mode(mode):
            seen[mode] = layer(x)
            assert_bitwise_equal(call(x), seen[mode])
    assert digest(seen[True]) != digest(seen[False])
    with tpi.set_tp_invariant_mode(None):
        for variable in ("TP_INVARIANT_MODE", "NVTE_TP_INVARIANT_MODE"):
            for text, mode in (("1", True), ("0", False), (None, False), ("1", True), (None, False)):
                monkeypatch.delenv(variable, raising=False)
                if text is not None:
                    monkeypatch.setenv(variable, text)
                assert_bitwise_equal(call(x), seen[mode])


def test_a_graph_break_is_an_error():
    """The control: fullgraph=True in the tests above has an effect."""

    class Broken(tpi.Linear):
        def forward(self, x: Tensor) -> Any:
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(Broken(8, 8), backend="aot_eager", fullgraph=True)(torch.ones(2, 8))


# --- settings -------------------------------------------------------------------------------------------------------


def scaled(scale: float) -> Any:
    """gemm_fns of the same code, which torch.compile treats as one function if it can."""
    return lambda a, b, *, bias=None, out_dtype=None: matmul(a, b, out_dtype=out_dtype) * scale


def test_each_layer_keeps_its_gemm_fn():
    layers = [tpi.Linear(8, 8, bias=False, gemm_fn=scaled(scale)) for scale in (1.0, 2.0)]
    x = torch.ones(2, 8)
    torch.compiler.reset()
    with tpi.set_tp_invariant_mode(True):
        for layer in layers:
            layer.compile(backend="aot_eager", fullgraph=True)
            assert_bitwise_equal(layer(x), layer.forward(x))
        layers[0].gemm_fn = layers[1].gemm_fn
        assert_bitwise_equal(layers[0](x), 2.0 * matmul(x, layers[0].weight.t()))


@pytest.mark.parametrize("dynamic", (None, True))
@pytest.mark.parametrize("norm", ("ParallelNorm", "LayerNormLinear"))
def test_each_norm_keeps_its_eps(norm, dynamic):
    """torch.compile makes a symbol of the second eps that it sees, and with dynamic=True of the first."""
    torch.manual_seed(0)
    make = (
        functools.partial(tpi.ParallelNorm, 8)
        if norm == "ParallelNorm"
        else functools.partial(tpi.LayerNormLinear, 8, 5)
    )
    layers = [make(eps=eps) for eps in (1e-6, 0.1, 1e-6, 0.3)]
    torch.compiler.reset()
    results: dict[float, Tensor] = {}
    with tpi.set_tp_invariant_mode(True):
        for layer in layers:
            layer.load_state_dict(layers[0].state_dict())
            seen = []
            for call in (torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic), layer):
                x = wide_randn(4, 8, generator=torch.Generator().manual_seed(1), spread=3).requires_grad_()
                layer.zero_grad()
                y = call(x)
                y.square().sum().backward()
                seen.append((y.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}))
            assert_bitwise_equal(*seen)
            results[layer.eps] = seen[0][0]
    assert len({digest(y) for y in results.values()}) == 3


def test_numbers_that_change_from_call_to_call():
    """label_smoothing and ignore_index are options too, given as arguments."""
    logits, target = torch.randn(4, 8), torch.tensor([1, 2, 3, 4])
    loss = functools.partial(tpi.vocab_parallel_cross_entropy, tp_group=None)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda s, i: loss(logits, target, label_smoothing=s, ignore_index=i), fullgraph=True, backend="aot_eager"
    )
    with tpi.set_tp_invariant_mode(True):
        for smoothing, ignored in ((0.1, -100), (0.2, 1), (0.3, 2), (0.1, 3)):
            assert_bitwise_equal(
                compiled(smoothing, ignored), loss(logits, target, label_smoothing=smoothing, ignore_index=ignored)
            )


def test_a_mesh_in_compiled_code():
    for eager, compiled in run_ranks(loss_over_a_mesh, 2):
        assert_bitwise_equal(compiled, eager)


def test_partition_stride_autocast_and_wrong_input():
    layer = tpi.Linear(32, 24, parallel_mode="column")
    torch.compiler.reset()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32)
    with tpi.set_tp_invariant_mode(True):
        for stride in (1, 2):
            layer.weight.partition_stride = stride
            assert_bitwise_equal(call(x), layer(x))
            assert layer.partition_stride == stride
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call(x).dtype == torch.bfloat16
            assert_bitwise_equal(call(x), layer(x))
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"it must be \[\.\., 32\]|Observed exception"):
            call(torch.randn(4, 31))


def test_ids_out_of_range_are_found_when_compiled_code_runs():
    embedding = tpi.VocabParallelEmbedding(10, 4)
    torch.compiler.reset()
    call = torch.compile(embedding, backend="aot_eager", fullgraph=True)
    with tpi.set_tp_invariant_mode(True):
        assert_bitwise_equal(call(torch.tensor([1, 9])), embedding.weight[[1, 9]])
        with pytest.raises(IndexError, match="ids holds 10 on rank 0"):
            call(torch.tensor([1, 10]))


def unequal(tp_group: Any) -> None:
    group = resolve_group(tp_group)
    torch.compiler.reset()
    layer = tpi.Linear(8, 8, parallel_mode="row", tp_group=tp_group, owner_map=("rows", "cols")[group.rank])
    with tpi.set_tp_invariant_mode(True), pytest.raises(RuntimeError, match="owner_map is 'rows' on rank 0"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(2, 4))


def test_ranks_that_disagree():
    run_ranks(unequal, 2)


# --- the product as an op -------------------------------------------------------------------------------------------


def test_gemm_op():
    gemm_op = torch.ops.tp_invariant.gemm
    g = torch.Generator().manual_seed(0)
    a, b, bias = (wide_randn(*shape, generator=g, spread=3).requires_grad_() for shape in ((5, 300), (300, 7), (7,)))
    c = gemm_op(a, b, bias)
    assert_bitwise_equal(c.detach(), gemm(None, a.detach(), b.detach(), bias=bias.detach()))
    assert gemm_op(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32).dtype == torch.float32
    dc = wide_randn(5, 7, generator=g, spread=3)
    grads = torch.autograd.grad(c, (a, b, bias), dc)
    assert_bitwise_equal(grads[0], gemm(None, dc, b.detach().t()))
    exact = (dc.double() @ b.double().t(), a.double().t() @ dc.double(), dc.double().sum(0))
    torch.testing.assert_close(grads, exact, rtol=1e-4, atol=1e-4, check_dtype=False)
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b, bias: gemm_op(a, b, bias).relu(), backend="aot_eager", fullgraph=True)
    for rows in (5, 3):
        results = []
        for fn in (compiled, lambda a, b, bias: gemm_op(a, b, bias).relu()):
            y = fn(a[:rows], b, bias)
            results.append((y.detach(), torch.autograd.grad(y, (a, b, bias), dc[:rows])))
        assert_bitwise_equal(*results)
    torch.library.opcheck(gemm_op.default, (a, b, bias))


# --- what else is compiled ------------------------------------------------------------------------------------------


@needs_compiler
def test_clipping_in_compiled_code_runs_as_in_eager_mode():
    for degree in (1, 2):
        for eager, compiled in run_ranks(clipped, degree):
            assert_bitwise_equal(eager, compiled)
            assert float(eager[0]) > 0.5


@pytest.mark.more
def test_compiled_autograd():
    """Its compiler gets no formula of a gradient, nor what moves bytes: of eager and of compiled forwards."""
    for degree in (1, 2):
        for eager, *others in run_ranks(compiled_backward, degree):
            assert len(others) == 3
            for other in others:
                assert_bitwise_equal(other, eager)


def test_checkpoints_in_compiled_code():
    """Over several ranks what is recomputed is compiled, and the checkpoint is outside of it."""
    for degree in (1, 2):
        for eager, other in run_ranks(checkpointed, degree):
            assert_bitwise_equal(eager, other)


def kept(tp_group: Any) -> list[int]:
    counts = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graph.graph.eliminate_dead_code()
        counts.append(sum("row_linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    layer = tpi.Linear(32, 16, parallel_mode="row", tp_group=tp_group)

    def unused(x: Tensor) -> Tensor:
        layer(x)
        return x + 1

    with tpi.set_tp_invariant_mode(True):
        torch.compile(unused, backend=count, fullgraph=True)(torch.ones(4, 32 // tp_group.size()))
    return counts


def test_what_moves_bytes_stays_in_a_graph_that_makes_no_use_of_it():
    """The other ranks, whose graphs may, wait for it."""
    assert run_ranks(kept, 2) == [[1], [1]]
    assert run_ranks(kept, 1) == [[0]]


def test_cuda_graphs_that_torch_makes_of_several_ranks():
    """Operators in them leave nothing behind, others do. On a CPU no graph is made of them, but they run as in one."""
    ((eager, *_),) = run_ranks(in_cuda_graphs, 1)
    for *results, off in run_ranks(in_cuda_graphs, 2):
        for (grads, groups), known in zip(results, (1, 1, 0), strict=True):
            assert_bitwise_equal(grads, eager[0])
            assert groups == known
        assert digest(off[0]) != digest(eager[0])


@needs_compiler
def test_compiled_optimizer_steps():
    """TP=1's bits, inductor's own; a kept weight is gathered again once compiled code has written to it."""
    (whole,) = run_ranks(compiled_steps, 1)
    exact = compiled_steps(None, torch.float64, compiled=False)
    for got, expected in zip(whole, exact, strict=True):
        assert max(error(got[name], expected[name]) for name in got) < 1e-5
    for got in run_ranks(compiled_steps, 2):
        assert_bitwise_equal(got, whole)


# --- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("degree", (1, 2))
def test_gpu(degree, backend):
    if degree > torch.cuda.device_count():
        pytest.skip(f"needs {degree} GPUs")
    ranks = functools.partial(testing.run_ranks, device="cuda")
    (expected,) = ranks(pair_grads, 1, None, "cuda", torch.bfloat16)
    for got in ranks(pair_grads, degree, backend, "cuda", torch.bfloat16):
        assert_bitwise_equal(got, expected)
    (whole,) = ranks(steps, 1, True, None, (True, True), torch.bfloat16, "cuda")
    for got in ranks(steps, degree, True, "aot_eager", (True, True), torch.bfloat16, "cuda"):
        assert_bitwise_equal(got, whole)
