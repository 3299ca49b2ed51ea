"""The table of plans: a repeated call equals a fresh one, whatever the memory and the values.

Without a GPU the compiled forms are stand-ins that run Triton's interpreter, so that calls take the way of a GPU's.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Described
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import native_specialize_impl
from triton.tools.tensor_descriptor import TensorDescriptor

from tp_invariant.kernels import plans
from tp_invariant.kernels.attention import forward as attention
from tp_invariant.kernels.attention.spec import AttentionSpec
from tp_invariant.kernels.experts import grouped, routing
from tp_invariant.kernels.gemm import matmul, matmul_tma
from tp_invariant.kernels.launch import empty
from tp_invariant.kernels.rowwise import add_norm, gated, norm, rope, softmax
from tp_invariant.kernels.vocabulary import cross_entropy, embedding
from tp_invariant.kernels.vocabulary.loss_spec import LossSpec
from tp_invariant.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16
SPEC, LOSS = AttentionSpec(causal=True, scale=0.3), LossSpec(60, -100, 0.1, 1e-3)
NORM = dict(rms=False, zero_centered=True)


def norms(x, dy, w):
    y, mean, rstd = norm.norm_forward(x, w, w, eps=1e-5, **NORM)
    dx, sums = norm.norm_backward(dy, x, w, mean, rstd, rows_per_sum=4, with_bias=True, **NORM)
    return y, dx, *norm.fold_weight_gradients(sums, w.dtype, w.dtype), *add_norm.add_norm_forward(
        x, dy, w, None, eps=1e-5, **NORM
    )  # fmt: skip


def losses(logits, grad):
    target = torch.arange(len(logits), device=logits.device) * 3
    values, stats = cross_entropy.whole_losses(logits, target, LOSS)
    total, count = cross_entropy.sum_of_tokens(values, target, LOSS, mean=True)
    return values, total, cross_entropy.logits_grad(grad[0, 0].float(), logits, target, stats, count, 60, 0, LOSS)


def attentions(q, k, v):
    out, lse = attention.forward(q, k, v, SPEC)
    return out, lse, *attention.backward(q, q, k, v, out, lse, SPEC)[:3]


def routes(scores, x):
    scores = scores.float()
    weights, index, *_ = routing.choose(scores, scores, 2, normalize=True, epsilon=0.0, scale=1.5, out_dtype=x.dtype)
    order, places, offsets = routing.sort_by_expert(index, scores.shape[1])
    rows = routing.spread_rows(x, places)
    products = grouped.grouped_matmul(rows, x.t().expand(scores.shape[1], -1, -1), offsets)
    return weights, order, rows, products, routing.combine(rows, weights, places), grouped.grouped_outer(
        rows, rows, offsets
    )  # fmt: skip


# of each operation its function, and the shapes of its tensors
OPERATIONS = {
    "norms": (norms, (9, 64), (9, 64), (64,)),
    "losses": (losses, (9, 64), (9, 64)),
    "attention": (attentions, (1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16)),
    "routing and experts": (routes, (9, 6), (9, 32)),
    "gated": (lambda *xs: [gated.gated_forward(*xs[:2], "silu"), *gated.gated_backward(*xs, "silu")], *3 * [(5, 64)]),
    "gated with torch's bits": (lambda x, y: [gated.torch_gated_forward(x, y, "gelu_tanh")], (2, 5, 64), (2, 5, 64)),
    "rotation": (lambda q, k, cos: rope.rope(q, k, cos, cos), (2, 3, 5, 16), (2, 1, 5, 16), (2, 5, 8)),
    "softmax": (
        lambda x: [softmax.softmax(x, log=True, out_dtype=x.dtype), softmax.row_sums(x, divisor=3, out_dtype=x.dtype)],
        (7, 50),
    ),
    "embedding": (
        lambda dy: [embedding.embedding_grad(dy, torch.arange(70, device=dy.device) % 3, 8, dy.dtype)],
        (70, 24),
    ),
    "product": (lambda a, b: [matmul.matmul(a, b)], (64, 128), (128, 256)),
}


class Compiled:
    """What Triton returns of a launch: with a grid it is launched again."""

    def __init__(self, function, options):
        self.function, self.options = function, options

    def __getitem__(self, grid):
        return lambda *args, stream: interpret(self.function, *args, grid=grid, warmup=False, **self.options)


interpret = InterpretedFunction.run


def run_and_compile(self, *args, grid, warmup, **options):
    interpret(self, *args, grid=grid, warmup=warmup, **options)
    return Compiled(self, options)


@pytest.fixture
def table(monkeypatch):
    """An empty one."""
    monkeypatch.setattr(plans, "_plans", {})
    if DEVICE == "cpu":
        monkeypatch.setattr(plans, "interpreting", lambda: False)
        monkeypatch.setattr(plans, "_stream_of", lambda: lambda index: 0)
        monkeypatch.setattr(InterpretedFunction, "run", run_and_compile)
    return plans._plans


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")  # as meant
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_repeated_call_equals_a_fresh_one(table, name):
    function, *shapes = OPERATIONS[name]

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(DEVICE, DTYPE) for shape in shapes]

    first, second = drawn(1), drawn(2)
    of_first = list(function(*first))
    size = len(table)
    repeated = list(function(*second))
    assert len(table) == size > 0
    table.clear()
    assert_bitwise_equal(repeated, list(function(*second)))
    with pytest.raises(AssertionError):  # the control: other values give other bits
        assert_bitwise_equal(repeated, of_first)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")  # as meant
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_plans_of_an_operation_hold_no_tensor(table, name):
    function, *shapes = OPERATIONS[name]
    tensors = [torch.randn(shape).to(DEVICE, DTYPE) for shape in shapes]
    results = [x for x in function(*tensors) if x is not None]
    memories = [weakref.ref(x) for x in (*tensors, *results)]
    del tensors, results
    gc.collect()
    assert len(table) > 0 and all(memory() is None for memory in memories)
    assert not any(isinstance(x, torch.Tensor) for plan in table.values() for x in reachable(plan))
    x = torch.ones(1)  # the control
    assert any(one is x for one in reachable({"plan": functools.partial(lambda: x)}))


def reachable(plan):
    """What a plan's closures, attributes and containers refer to."""
    seen, left = {}, [plan]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (type(gc), str, int, torch.dtype)):
            continue
        seen[id(x)] = x
        if isinstance(x, (tuple, list, set, dict)):
            left += [*x, *(x.values() if isinstance(x, dict) else ())]
        elif isinstance(x, functools.partial):
            left += [x.func, x.args, x.keywords]
        else:
            left += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
            left += [value for name, value in getattr(x, "__dict__", {}).items() if not name.startswith("__")]
    return seen.values()


# --- which compiled form runs -----------------------------------------------------------------------------------------

ARGUMENTS = [
    *(0, 1, 2, 15, 16, 17, -1, -16, -100, 2**31 - 1, 2**31 + 1, 2**31, -(2**31), -(2**31) - 16, 2**63 - 1, 2**63),
    *(0.0, 1.0, 16.0, None),
    *(torch.zeros(32, dtype=dtype)[start:] for dtype in (DTYPE, torch.float32, torch.int64) for start in (0, 1, 16)),
    *(TensorDescriptor(torch.zeros(64, 64), [64, 64], [64, 1], [16, cols]) for cols in (16, 32)),
    TensorDescriptor(torch.zeros(32, 64), [32, 64], [64, 1], [16, 16]),
    TensorDescriptor(torch.zeros(64, 64).half(), [64, 64], [64, 1], [16, 16]),
]


def test_no_two_arguments_that_triton_compiles_apart_for_have_one_form():
    theirs = [native_specialize_impl(CUDABackend, x, False, True, True) for x in ARGUMENTS]
    ours = [plans.specialization(x) for x in ARGUMENTS]
    for (one, of_one), (other, of_other) in itertools.combinations(zip(ours, theirs, strict=True), 2):
        assert one != other or of_one == of_other, (of_one, of_other)
    assert len(set(ours)) < len(ours)


class FakeKernel:
    """Compiles at each call and records the launches."""

    def __init__(self):
        self.options, self.launched = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **options):
            number = len(self.options)
            self.options.append(options)
            self.launched.append((number, grid, args))

            class Form:
                def __getitem__(_, grid):
                    return lambda *args, stream: self.launched.append((number, grid, args))

            return Form()

        return compile_and_launch


def test_a_launch_is_of_the_kernel_compiled_for_its_arguments(table, monkeypatch):
    monkeypatch.setattr(plans, "interpreting", lambda: False)
    function = FakeKernel()
    kernel = plans.Kernel(function, enable_fp_fusion=False)
    x, half = torch.zeros(64), torch.zeros(64).half()
    plain = (0, (x, 32, 0.5), (True, 8), 4)
    others = [
        (0, (x[1:], 32, 0.5), (True, 8), 4), (0, (half, 32, 0.5), (True, 8), 4), (0, (None, 32, 0.5), (True, 8), 4),
        (0, (x, 33, 0.5), (True, 8), 4), (0, (x, 1, 0.5), (True, 8), 4), (0, (x, 2**31, 0.5), (True, 8), 4),
        (0, (x, 32, 0.5), (False, 8), 4), (0, (x, 32, 0.5), (True, 16), 4), (0, (x, 32, 0.5), (True, 8), 8),
        (1, (x, 32, 0.5), (True, 8), 4), (0, (x, 32.0, 0.5), (True, 8), 4), (0, (x, 32, 1), (True, 8), 4),
    ]  # fmt: skip
    alike = [(0, (x[16:], 48, 0.25), (True, 8), 4), (0, (x, 32, 1.0), (True, 8), 4)]
    calls = [plain, *others, plain, *others, *alike, *alike]
    for at, (index, args, constants, warps) in enumerate(calls):
        kernel(index, (3, at), args, constants, num_warps=warps)
    assert [number for number, _, _ in function.launched] == [*range(13), *range(13), 0, 0, 0, 0]
    assert len(function.options) == 13
    assert function.options[9] == {"enable_fp_fusion": False, "num_warps": 8}
    for at, (_, grid, got) in enumerate(function.launched):
        _, args, constants, _ = calls[at]
        assert grid == (3, at, 1) and len(got) == 5 and all(a is b for a, b in zip(got, args + constants, strict=True))


def test_arguments_of_other_layouts_launch_the_form_that_is_compiled_for_their_kinds(table, monkeypatch):
    monkeypatch.setattr(plans, "interpreting", lambda: False)
    function = FakeKernel()
    kernel = plans.Kernel(function)
    for at, (rows, warps) in enumerate(((32, 4), (48, 4), (33, 4), (48, 8))):
        launch = plans.Launch(kernel, -1, (at,), (True,), num_warps=warps)
        for x in torch.zeros(2, 64):
            launch(x, rows)
    numbers = [number for number, _, _ in function.launched]
    assert numbers == [0, 0, 0, 0, 1, 1, 2, 2] and len(function.options) == 3
    assert [grid for _, grid, _ in function.launched] == [(at, 1, 1) for at in range(4) for _ in range(2)]
    assert function.launched[3][2][1:] == (48, True)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def checked(table, monkeypatch):
    """The calls of matmul that were checked, which is what one with a plan is not; on a CPU by TMA's kernel, too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(matmul, "interpreting", lambda: False)
        monkeypatch.setattr(matmul_tma, "supports_tma", lambda *args: True)
        monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel with plans is Hopper's")
    calls, check = [], matmul.check_operands
    monkeypatch.setattr(matmul, "check_operands", lambda *args: (calls.append(args), check(*args)))
    return calls


def whole_numbers(*shape):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(
        DEVICE, DTYPE
    )  # fmt: skip


def test_a_product_of_other_layouts_or_options_has_another_plan(checked, table):
    wide, other = whole_numbers(40, 160), torch.float16 if DEVICE == "cuda" else torch.float32
    a, b, bias = whole_numbers(32, 64), whole_numbers(64, 48), whole_numbers(48)
    at, bt = a.t().contiguous().t(), b.t().contiguous().t()
    calls = [
        (a, b, {}), (at, b, {}), (a, bt, {}), (at, bt, {}), (a[:16], b, {}), (wide[:32, :64], b, {}),
        (a.to(other), b.to(other), {}), (a, b, dict(bias=bias)), (a, b, dict(bias=bias.float())),
        (a, b, dict(bias=whole_numbers(96)[::2])), (a, b, dict(out_dtype=torch.float32)),
        (a, b, dict(promote_every=128)),
    ]  # fmt: skip
    for number, (x, y, options) in enumerate(2 * calls):
        del checked[:]
        x, y = (z.clone(memory_format=torch.preserve_format) if z.is_contiguous() else z for z in (x, y))
        got = matmul.matmul(x, y, **options)
        assert len(checked) == (number < len(calls)), number
        assert got.dtype == options.get("out_dtype", x.dtype) and got.is_contiguous()
        expected = x.double() @ y.double() + (options["bias"].double() if "bias" in options else 0)
        assert torch.equal(got.double(), expected), number


def test_a_product_that_has_no_plan_is_checked(checked, table):
    a, b, bias = whole_numbers(32, 64), whole_numbers(64, 48), whole_numbers(48)
    matmul.matmul(a, b, bias=bias, promote_every=128)
    matmul.matmul(a, b)
    size = len(table)
    for error, options in (
        (TypeError, dict(promote_every=128.0, bias=bias)), (TypeError, dict(out_dtype=torch.int32)),
        (TypeError, dict(out_dtype=["float"])), (ValueError, dict(accumulate=True)), (ValueError, dict(bias=bias[:40])),
        (TypeError, dict(bias=[0])),
    ):  # fmt: skip
        with pytest.raises(error):
            matmul.matmul(a, b, **options)
    with pytest.raises(TypeError):
        matmul.matmul(a, b.float())
    with pytest.raises(ValueError):
        matmul.matmul(a, b[:56])
    assert len(table) == size
    assert plans.layouts(torch.complex(a.float(), a.float()).conj().imag) is None
    out = torch.zeros(32, 48, device=DEVICE, dtype=DTYPE)
    assert matmul.matmul(a, b, out=out) is out
    assert torch.equal(out.double(), a.double() @ b.double())


# --- descriptors ------------------------------------------------------------------------------------------------------


def gluon_descriptor(x, shape, strides, block):
    return Described(x, shape, strides, block, NVMMASharedLayout.get_default_for(block, gl.float32))


DESCRIBED = [
    (torch.float32, (8, 64), (64, 1), (4, 32)), (torch.float32, (8, 32), (64, 1), (4, 32)),
    (torch.float32, (8, 64), (128, 1), (4, 32)), (torch.float32, (8, 64), (64, 1), (8, 32)),
    (torch.float32, (8, 64), (64, 1), (4, 64)), (torch.float16, (8, 64), (64, 1), (4, 32)),
    (torch.float32, (8, 4, 16), (64, 16, 1), (4, 1, 16)),
]  # fmt: skip


@pytest.mark.parametrize("make", [TensorDescriptor, gluon_descriptor])
def test_a_descriptor_equals_one_that_triton_has_checked(table, make):
    described = [case for case in DESCRIBED if case[0] == torch.float32 or make is TensorDescriptor]
    for _ in range(2):
        for dtype, shape, strides, block in described:
            x = torch.zeros(1024, dtype=dtype, device=DEVICE)
            made = plans.descriptor(x, shape, strides, block, make)
            checked = make(x, list(shape), list(strides), list(block))
            assert isinstance(made, type(checked)) and made.base is x
            assert all(getattr(made, name) == value for name, value in vars(checked).items() if name != "base")
            assert native_specialize_impl(CUDABackend, made, False, True, True) == native_specialize_impl(
                CUDABackend, checked, False, True, True
            )
    assert len(table) == len(described)


def test_what_triton_refuses_is_refused_after_a_plan_was_made(table):
    x, block = torch.zeros(1024, device=DEVICE), (4, 32)
    plans.descriptor(x, (8, 64), (64, 1), block)
    for y, shape, strides in (
        (x[1:], (8, 64), (64, 1)), (x.half(), (8, 64), (66, 1)), (x, (8, 64), (65, 1)), (x, (8, 64), (64, 2)),
        (x, (0, 64), (64, 1)),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises(AssertionError):
                plans.descriptor(y, shape, strides, block)
    plans.descriptor(x.half(), (8, 64), (72, 1), block)
    with pytest.raises(AssertionError):
        plans.descriptor(x, (8, 64), (66, 1), block)
    assert len(table) == 2


def test_the_table_holds_no_tensor(table):
    x = torch.zeros(1024, device=DEVICE)
    first, second = (plans.descriptor(x, (8, 64), (64, 1), (4, 32)) for _ in range(2))
    assert first.base is second.base is x
    memory = weakref.ref(x)
    del x, first, second
    assert len(table) == 1 and memory() is None


def test_a_plan_is_made_once_for_equal_arguments_and_none_is_a_plan(table):
    made = []
    plan = plans.planned(lambda *sizes: made.append(sizes))
    assert plan(2, 3) is plan(2, 3) is plan(3, 2) is None
    assert made == [(2, 3), (3, 2)]


def test_freed_memory_is_another_layout():
    """As fully_shard frees it: no plan of a tensor that has memory launches a kernel on it."""
    x = torch.zeros(16, 16)
    before = plans.layouts(x)
    x.untyped_storage().resize_(0)
    assert plans.layouts(x) != before
    assert plans.layouts(torch.zeros(16, 16)) == before


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (0, 4), (3, 1, 2)])
def test_a_tensor_is_made_as_torch_makes_it(shape):
    made, wanted = (new() for new in (empty(shape, DTYPE, torch.device(DEVICE)), lambda: torch.empty(shape)))
    assert made.shape == wanted.shape and made.stride() == wanted.stride()
    assert made.dtype == DTYPE and made.device.type == DEVICE
