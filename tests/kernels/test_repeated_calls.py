"""Calls of kernels that repeat an earlier one: the same launches, and each error of a first call.

Launches are recorded instead of made, on CPU tensors, so that the path which GPUs take is seen here.
"""

import contextlib
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tp_invariant.kernels import known_calls, launch
from tp_invariant.kernels.attention import backward as attention_backward
from tp_invariant.kernels.attention import forward as attention
from tp_invariant.kernels.attention.spec import AttentionSpec
from tp_invariant.kernels.experts import grouped, grouped_tma, routing
from tp_invariant.kernels.gemm import matmul, matmul_tma
from tp_invariant.kernels.launch import Launch
from tp_invariant.kernels.recent_calls import RecentCalls
from tp_invariant.kernels.rowwise import add_norm, gated, norm, rope, torch_gated
from tp_invariant.kernels.vocabulary import cross_entropy as loss
from tp_invariant.kernels.vocabulary.loss_spec import LossSpec


@pytest.fixture
def launches(monkeypatch):
    """The arguments of each launch, with addresses in place of tensors."""
    recorded = []

    def plain(x):
        return x.data_ptr() if isinstance(x, Tensor) else x

    def record(self, index, *args, grid=None):
        recorded.append((self._kernel.__name__, grid, *map(plain, args)))

    def describe(self, position, x, block, shape=None, strides=None):
        return x.data_ptr(), tuple(shape or x.shape), tuple(strides or x.stride())

    class Maps(dict):
        def __init__(self, launch, position, shape, strides):
            self.layout = shape, strides

        def __missing__(self, address):
            return address, *self.layout

    monkeypatch.setattr(Launch, "__call__", record)
    monkeypatch.setattr(Launch, "tensor_maps", lambda *args: Maps(*args))
    monkeypatch.setattr(Launch, "descriptor", describe)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(known_calls, "interpreting", lambda: False)
    for module in (norm, attention, attention_backward, torch_gated, rope, add_norm, routing, gated, grouped, loss):
        monkeypatch.setattr(module, "interpreting", lambda: False, raising=False)
        monkeypatch.setattr(module, "launch_on", lambda *args: contextlib.nullcontext())
    known_calls._known.clear()
    monkeypatch.setattr(known_calls, "_recent", RecentCalls())
    yield recorded
    known_calls._known.clear()


@pytest.fixture
def strict_allocation(monkeypatch):
    """Results are allocated as on CUDA, by what takes tuples and nothing derived from them, such as torch.Size."""
    empty = launch.empty

    def allocate(shape, strides, dtype):
        assert type(shape) is tuple and type(strides) is tuple and type(dtype) is torch.dtype
        return torch.empty_strided(shape, strides, dtype=dtype)

    def on_cuda(shape, dtype, device, strides=None):
        return empty(shape, dtype, torch.device("cuda"), strides)

    monkeypatch.setattr(launch, "_empty_strided", allocate)
    for module in (attention_backward, grouped_tma):
        monkeypatch.setattr(module, "empty", on_cuda)
    for module in (known_calls, attention, attention_backward):
        monkeypatch.setattr(module, "allocator", lambda device: allocate)


def twice(run, recorded, known, **inputs):
    """The launches of a first call and of the one after it, with a name in place of each known address."""
    found, keep = [], []
    for _ in range(2):
        recorded.clear()
        outputs = [x for x in run(**inputs) if x is not None]
        keep.append(outputs)  # so that no address is used again
        names = {x.data_ptr(): name for name, x in inputs.items() if isinstance(x, Tensor)}
        names |= {x.data_ptr(): f"output {i}" for i, x in enumerate(outputs)}
        launched = [
            tuple(names.get(x, "new memory") if isinstance(x, int) and x > 2**32 else x for x in one)
            for one in recorded
        ]
        found.append((launched, [(x.shape, x.stride(), x.dtype) for x in outputs]))
        assert known, "nothing was remembered"
    return found


@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_norms(launches, rms, bias):
    """Of rows, and of rows that have more dims."""
    x, dy = torch.randn(2, *((2, 20) if bias else (40,)), 64, dtype=torch.bfloat16).unbind()
    weight = torch.randn(64)
    b = torch.randn(64) if bias else None

    def forward(x, weight, b):
        return norm.norm_forward(x, weight, b, eps=1e-5, rms=rms, zero_centered=False)

    first, again = twice(forward, launches, known_calls._known, x=x, weight=weight, b=b)
    assert first[1][0][0] == x.shape
    if rms:  # which has no mean: its kernel gets any address for it
        first, again = (([(*one[:6], None, *one[7:]) for one in launched], made) for launched, made in (first, again))
    assert first == again
    mean, rstd = (None if rms else torch.zeros(40)), torch.ones(40)

    def backward(dy, x, weight, mean, rstd):
        return norm.norm_backward(
            dy, x, weight, mean, rstd, rows_per_sum=32, rms=rms, zero_centered=False, with_bias=bias
        )

    first, again = twice(backward, launches, known_calls._known, dy=dy, x=x, weight=weight, mean=mean, rstd=rstd)
    assert first == again

    def partial_sums(dy, x, mean, rstd):
        return [norm.norm_weight_partial_sums(dy, x, mean, rstd, rows_per_sum=32, rms=rms, with_bias=bias)]

    first, again = twice(partial_sums, launches, known_calls._known, dy=dy, x=x, mean=mean, rstd=rstd)
    assert first == again
    sums = torch.zeros(2, 128 if bias else 64)

    def fold(sums):
        return norm.fold_weight_gradients(sums, torch.bfloat16, torch.float32 if bias else None)

    first, again = twice(fold, launches, known_calls._known, sums=sums)
    assert first == again


@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
def test_norms_over_heads(launches, rms):
    x, dy = torch.randn(2, 2, 5, 3, 64, dtype=torch.bfloat16).unbind()
    weight, rstd, mean = torch.randn(64), torch.ones(30), None if rms else torch.zeros(30)

    def backward(dy, x, weight, mean, rstd):
        return norm.norm_backward_of_heads(dy, x, weight, mean, rstd, rows_per_sum=32, rms=rms, zero_centered=False)

    first, again = twice(backward, launches, known_calls._known, dy=dy, x=x, weight=weight, mean=mean, rstd=rstd)
    assert first == again and len(first[0]) == 4
    assert any(isinstance(known, norm._KnownOfHeads) for known in known_calls._known.values())


@pytest.mark.parametrize("form", ("contiguous", "halves", "tokens between heads"))
def test_gated_activations(launches, form):
    gate, up, dy = torch.randn(3, 2, 5, 64, dtype=torch.bfloat16).unbind()
    if form == "halves":
        gate, up = torch.randn(2, 5, 128, dtype=torch.bfloat16).chunk(2, dim=-1)
    elif form == "tokens between heads":  # no view of rows
        gate = torch.randn(5, 2, 64, dtype=torch.bfloat16).transpose(0, 1)

    def forward(gate, up):
        return [torch_gated.torch_gated_forward(gate, up, "silu")]

    def backward(dy, gate, up):
        return torch_gated.torch_gated_backward(dy, gate, up, "silu")

    def into_halves(dy, gate, up, dx):
        torch_gated.torch_gated_backward(dy, gate, up, "silu", out=dx.chunk(2, dim=-1))
        return [dx]

    if form == "tokens between heads":
        with pytest.raises(AssertionError, match="nothing was remembered"):
            twice(forward, launches, known_calls._known, gate=gate, up=up)
        return
    first, again = twice(forward, launches, known_calls._known, gate=gate, up=up)
    assert first == again
    for run, more in ((backward, {}), (into_halves, {"dx": torch.zeros(2, 5, 128, dtype=torch.bfloat16)})):
        first, again = twice(run, launches, known_calls._known, dy=dy, gate=gate, up=up, **more)
        assert first == again


def test_gated_activations_of_experts(launches):
    gate, up, dy = torch.randn(3, 5, 64, dtype=torch.bfloat16).unbind()

    def forward(gate, up):
        return [gated.gated_forward(gate, up, "silu")]

    def backward(dy, gate, up, dx):
        gated.gated_backward(dy, gate, up, "silu", out=dx.chunk(2, dim=-1))
        return [dx]

    first, again = twice(forward, launches, known_calls._known, gate=gate, up=up)
    assert first == again
    dx = torch.zeros(5, 128, dtype=torch.bfloat16)
    first, again = twice(backward, launches, known_calls._known, dy=dy, gate=gate, up=up, dx=dx)
    assert first == again


ROUTING = {
    "combine": lambda rows, weights, places: [routing.combine(rows, weights, places)],
    "combine without weights": lambda rows, places: [routing.combine(rows, None, places)],
    "combine_backward": lambda x, weights, rows, places: routing.combine_backward(x, weights, rows, places),
    "spread_rows": lambda x, places: [routing.spread_rows(x, places)],
    "choose": lambda scores: routing.choose(
        scores, scores, 3, normalize=False, epsilon=0.0, scale=1.0, out_dtype=torch.bfloat16
    ),
    "choose and normalize": lambda scores, choice: routing.choose(
        scores, choice, 3, normalize=True, epsilon=0.1, scale=2.0, out_dtype=torch.float32
    ),
    "choose_backward": lambda weights, places, y: [
        routing.choose_backward(weights, places, y, None, experts=9, scale=2.0)
    ],
    "choose_backward and normalize": lambda weights, places, y, total: [
        routing.choose_backward(weights, places, y, total, experts=9, scale=2.0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTING)
def test_routing(launches, name):
    given = dict(
        x=torch.randn(6, 64), rows=torch.randn(18, 64), weights=torch.rand(6, 3), places=torch.arange(18).view(6, 3),
        scores=torch.rand(6, 9), choice=torch.rand(6, 9), y=torch.rand(6, 3), total=torch.rand(6),
    )  # fmt: skip
    code = ROUTING[name].__code__
    inputs = {key: given[key] for key in code.co_varnames[: code.co_argcount]}
    first, again = twice(ROUTING[name], launches, known_calls._known, **inputs)
    assert first == again and len(first[0]) == 1
    known = len(known_calls._known)
    copied = {key: x.t().contiguous().t() if x.dim() == 2 else x for key, x in inputs.items()}
    ROUTING[name](**copied)  # which must be copied
    assert len(known_calls._known) == known


@pytest.mark.parametrize("alone", (False, True))
@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.usefixtures("strict_allocation")
def test_rotations(launches, alone, backward):
    q = torch.randn(2, 7, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    k = None if alone else torch.randn(2, 7, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = torch.randn(2, 1, 7, 64, dtype=torch.bfloat16).unbind()

    def rotate(q, k, cos, sin):
        return rope.rope(q, k, cos, sin, backward=backward)

    first, again = twice(rotate, launches, known_calls._known, q=q, k=k, cos=cos, sin=sin)
    assert first == again
    assert first[1][0][:2] == (q.shape, q.stride())


@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
def test_additions_and_norms(launches, rms):
    x, residual = torch.randn(2, 40, 64, dtype=torch.bfloat16).unbind()
    weight, bias = torch.randn(64), None if rms else torch.randn(64)

    def forward(x, residual, weight, bias):
        return add_norm.add_norm_forward(x, residual, weight, bias, eps=1e-5, rms=rms, zero_centered=False)

    first, again = twice(forward, launches, known_calls._known, x=x, residual=residual, weight=weight, bias=bias)
    if rms:  # which has no mean: its kernel gets any address for it
        first, again = (([(*one[:8], None, *one[9:]) for one in launched], made) for launched, made in (first, again))
    assert first == again


def test_a_repeated_norm_is_another_one_if_anything_differs(launches):
    x, weight = torch.randn(40, 64), torch.randn(64)

    def run(x, weight=weight, eps=1e-5, **options):
        return norm.norm_forward(x, weight, None, **dict(dict(eps=eps, rms=True, zero_centered=False), **options))

    for _ in range(2):
        run(x)
    known = len(known_calls._known)
    with pytest.raises(ValueError, match="weight has shape"):
        run(x, torch.randn(63))
    with pytest.raises(TypeError, match="x has dtype"):
        run(x.double())
    with pytest.raises(ValueError, match="eps is -1"):
        run(x, eps=-1)
    with pytest.raises(TypeError, match="out_dtype"):
        run(x, out_dtype=torch.int32)
    assert len(known_calls._known) == known
    launches.clear()
    unaligned = torch.randn(40 * 64 + 1)[1:].view(40, 64)
    for _ in range(2):
        run(unaligned)
    assert all(unaligned.data_ptr() not in one for one in launches), "it must be copied each time"
    run(x, eps=1e-6)
    assert 1e-6 in launches[-1] and 1e-5 not in launches[-1]


@pytest.mark.parametrize("shape", [(40, 96), (2, 20, 96)], ids=["rows", "more dims"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.usefixtures("strict_allocation")
def test_cross_entropy(launches, shape, mean):
    spec = LossSpec(90, -100, 0.1 if mean else 0.0, 0.01)
    logits, target = torch.randn(shape, dtype=torch.bfloat16), torch.randint(90, shape[:-1])
    stats, count = torch.zeros(2, 40), torch.tensor(40) if mean else None

    def losses(logits, target):
        return loss.whole_losses(logits, target, spec)

    def total(losses, target):
        return loss.sum_of_tokens(losses, target, spec, mean=mean)

    def gradient(grad, logits, target, stats, count):
        return [loss.logits_grad(grad, logits, target, stats, count, 90, 0, spec)]

    first, again = twice(losses, launches, known_calls._known, logits=logits, target=target)
    assert first == again
    first, again = twice(total, launches, known_calls._known, losses=torch.zeros(40), target=target)
    assert first == again
    for grad in (torch.ones(()), torch.ones(shape[:-1])):
        known = len(known_calls._known)
        tensors = dict(grad=grad, logits=logits, target=target, stats=stats, count=count)
        first, again = twice(gradient, launches, known_calls._known, **tensors)
        assert first == again and first[1][0][0] == logits.shape
        assert len(known_calls._known) == known + 1
    gradient(**{**tensors, "logits": logits.mT.contiguous().mT})  # must be copied
    assert len(known_calls._known) == known + 1


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_same_operators_at_every_call(launches):
    """Selective checkpointing counts them: another operator's saved result would be taken for that of one less."""
    x, q, cos, index = torch.randn(2, 20, 64), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), torch.arange(8).view(4, 2)
    ids = torch.zeros(2, 20, dtype=torch.int64)
    for name, run in {
        "norm": lambda: norm.norm_forward(x, torch.ones(64), None, eps=1e-5, rms=True, zero_centered=False),
        "rope": lambda: rope.rope(q, q, cos, cos),
        "torch_gated": lambda: torch_gated.torch_gated_forward(x, x, "silu"),
        "spread_rows": lambda: routing.spread_rows(x[0, :4], index),
        "gated": lambda: gated.gated_forward(x[0], x[0], "silu"),
        "cross-entropy": lambda: loss.whole_losses(x, ids, LossSpec(64, -100, 0.0, 0.0)),
    }.items():
        modes = []
        for _ in range(2):
            with Seen() as mode:
                run()
            modes.append(mode.operators)
            run()  # and so it is known
        assert modes[0] == modes[1] != [], name


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("strict_allocation")
def test_attention(launches, kv_heads, dtype):
    spec = AttentionSpec(causal=True, scale=0.125)
    q = torch.randn(2, 4, 100, 64, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, 100, 64, dtype=dtype).unbind()
    first, again = twice(lambda q, k, v: attention.forward(q, k, v, spec), launches, known_calls._known, q=q, k=k, v=v)
    assert first == again
    out, dout = torch.randn(2, 2, 100, 4, 64, dtype=dtype).transpose(2, 3).unbind()
    lse = torch.zeros(2, 4, 100)

    def backward(dout, q, k, v, out, lse):
        return attention_backward.backward(dout, q, k, v, out, lse, spec)[:3]

    tensors = dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    first, again = twice(backward, launches, known_calls._known, **tensors)
    assert first == again
    assert len(first[0]) == (3 if kv_heads == 4 else 4)
    known = len(known_calls._known)
    backward(**{**tensors, "q": q.transpose(2, 3).contiguous().transpose(2, 3)})  # must be copied
    assert len(known_calls._known) == known


@pytest.fixture
def products(launches, monkeypatch):
    """`launches`, also of products by TMA, on a GPU of 132 multiprocessors."""
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, c_stride, out_dtype: True)
    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 132)
    monkeypatch.setattr(matmul_tma, "_prepared", {})
    monkeypatch.setattr(matmul_tma, "_prepared_together", {})
    monkeypatch.setattr(matmul_tma, "_recent", RecentCalls())
    monkeypatch.setattr(Launch, "direct", True)
    matmul_tma._plan.cache_clear()
    yield launches
    matmul_tma._plan.cache_clear()


def new(*shape, transposed=False):
    return (
        torch.empty(shape[::-1], dtype=torch.bfloat16).t() if transposed else torch.empty(shape, dtype=torch.bfloat16)
    )


PRODUCTS = {
    "plain": lambda: ((new(256, 512), new(512, 384)), {}),
    "transposed": lambda: ((new(256, 512, transposed=True), new(512, 384, transposed=True)), {}),
    "rows of a wider matrix": lambda: ((new(256, 640)[:, :512], new(512, 384)), {}),
    "a bias": lambda: ((new(256, 512), new(512, 384)), {"bias": new(384)}),
    "fp32": lambda: ((new(256, 512), new(512, 384)), {"out_dtype": torch.float32, "promote_every": 128}),
    "two descriptors of b": lambda: ((new(2048, 4096), new(4096, 1536, transposed=True)), {}),
    "rank-major": lambda: ((new(2, 256, 64), new(2, 384, 64)), {"b_k_dim": 1}),
    "rank-major, K first": lambda: ((new(2, 256, 64), new(2, 64, 384)), {"b_k_dim": 0, "bias": new(384)}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_the_same_layouts_elsewhere_in_memory(products, name):
    """The launch of a first call, with the addresses of the second one's operands."""
    found, kept = [], []
    for call in range(3):
        products.clear()
        (a, b), options = PRODUCTS[name]()
        c = (matmul.matmul_rank_major if "b_k_dim" in options else matmul.matmul)(a, b, **options)
        kept.append((a, b, c, options))  # so that no address is used again
        names = {
            x.data_ptr(): text
            for text, x in {"a": a, "b": b, "c": c, "bias": options.get("bias")}.items()
            if x is not None
        }
        found.append([tuple(names.get(x, x) for x in one) for one in products])
        assert len(matmul_tma._prepared) == 1, f"call {call} was not taken for the first one's like"
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
    assert {"a", "b", "c"} <= {x for x in found[0][0] if isinstance(x, str)}
    (prepared,) = matmul_tma._prepared.values()
    assert (prepared.of_narrow is not None) == (name == "two descriptors of b")
    product = kept[0][2]
    assert (tuple(product.shape), product.dtype) == (prepared.shape, options.get("out_dtype", torch.bfloat16))


@pytest.mark.parametrize("kind", ("rows", "rows of transposed weights", "rows and a bias", "outer"))
def test_products_by_expert_of_the_same_layouts_elsewhere_in_memory(launches, monkeypatch, kind):
    monkeypatch.setattr(grouped_tma, "supports_tma", lambda a, c_stride, out_dtype: True)
    monkeypatch.setattr(grouped_tma, "multiprocessors_of", lambda index: 132)
    monkeypatch.setattr(grouped_tma, "_calls", {})
    monkeypatch.setattr(Launch, "direct", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index that CPU tensors have
    found, kept = [], []
    for counts in ((20, 41, 67), (0, 128, 0), (1, 1, 126)):
        launches.clear()
        offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        a, b = new(128, 64), new(128, 96) if kind == "outer" else new(3, 64, 96)
        b = b.mT.contiguous().mT if "transposed" in kind else b
        bias = new(3, 96) if "bias" in kind else None
        if kind == "outer":
            c = grouped.grouped_outer(a, b, offsets)
        else:
            c = grouped.grouped_matmul(a, b, offsets, bias=bias)
        kept.append((a, b, c, bias, offsets))  # so that no address is used again
        texts = dict(a=a, b=b, c=c, offsets=offsets, **({} if bias is None else {"bias": bias}))
        names = {x.data_ptr(): text for text, x in texts.items()}
        found.append(([tuple(names.get(x, x) for x in one) for one in launches], c.shape, c.stride(), c.dtype))
        assert len(grouped_tma._calls) == 1
    assert found[0] == found[1] == found[2] and len(found[0][0]) == 1
    assert {"a", "b", "c", "offsets"} <= {x for x in found[0][0][0] if isinstance(x, str)}
