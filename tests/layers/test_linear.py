"""Linear: the contract as a matrix, accuracy, negative controls, GEMM counts and what bad input gets."""

from __future__ import annotations

import functools
import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from cases import more
from layer_cases import Case, assert_cases_invariant, check_accuracy, run, run_all
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tp_invariant as tpi
from tp_invariant.diagnostics.verify_case import error
from tp_invariant.functional import stock
from tp_invariant.testing import RankError, assert_bitwise_equal

MODES = ("column", "row")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OWNER_MAPS = ("replicate", "rows", "cols", "auto")
FIXED = OWNER_MAPS[:3]  # "auto" takes one of these before any product: test_matrix has it at every degree
DEGREES = (2, 3, 4, 8)


def sizes(mode: str, degree: int, stride: int) -> tuple[int, int]:
    """(in_features, out_features): the sharded one splits into odd pieces, the other is odd and divides by nothing."""
    sharded = degree * stride * (7 if degree * stride > 8 else 17)
    return (53, sharded) if mode == "column" else (sharded, 53)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("mode", MODES)
def test_matrix(mode, degree):
    """Stride x owner map x whole and SP inputs, 2-D and 3-D (sequence first and second), each at every degree.

    Bias and dtype are dealt out: over the degrees each of these has both and all three. On more than two ranks each
    pair: strides order features and inputs order tokens, so that these two meet the owner map, but not each other.
    """
    cases = []
    for stride, (i, owner_map) in itertools.product((1, 2, 3), enumerate(OWNER_MAPS)):
        k, n = sizes(mode, degree, stride)
        base = Case(mode, k, n, (2 * degree,), stride=stride, owner_map=owner_map)
        layouts = [
            base.with_(tokens=(11,)),
            base.with_(tokens=(3, 5)),
            base.with_(sequence_parallel=True),
            base.with_(sequence_parallel=True, tokens=(degree, 3)),
            base.with_(sequence_parallel=True, tokens=(2, degree), sequence_dim=1),
        ]
        for j, case in enumerate(layouts):
            if degree > 2 and (stride + 2 * i + j) % 3:
                continue
            deal = DEGREES.index(degree) + stride + i + j
            cases.append(case.with_(bias=deal % 2 == 0, dtype=DTYPES[deal % 3]))
    assert_cases_invariant(cases, degree)


@pytest.mark.parametrize("degree", (more(5), more(6), 7))
@pytest.mark.parametrize("mode", MODES)
def test_other_degrees(mode, degree):
    """Each pair of stride, owner map and inputs; all three together on two ranks in `test_matrix`."""
    cases = []
    for stride, (i, owner_map), sp in itertools.product((1, 2), enumerate(FIXED), (False, True)):
        if (stride + i + sp + degree) % 2:
            continue
        k, n = sizes(mode, degree, stride)
        cases.append(Case(mode, k, n, (degree, 2), stride=stride, owner_map=owner_map, sequence_parallel=sp))
    assert_cases_invariant(cases, degree)


@pytest.mark.parametrize("mode", MODES)
def test_token_counts(mode):
    """One token on eight ranks, fewer tokens than ranks, none at all, and more dims; only `rows` divides them."""
    k, n = sizes(mode, 8, 1)
    tokens = [(1,), (0,), (2, 2, 2, 3), (3,), (9,), (2, 0), (65,)]
    cases = [
        Case(mode, k, n, shape, owner_map=owner_map, dtype=DTYPES[(i + j + (mode == "row")) % 2])
        for (i, shape), (j, owner_map) in itertools.product(enumerate(tokens), enumerate(FIXED))
        if owner_map == "rows" or i < 3
    ]
    cases += [
        Case(mode, k, n, shape, owner_map=owner_map, sequence_parallel=True, sequence_dim=dim)
        for (shape, dim), owner_map in itertools.product([((8,), 0), ((0, 3), 0), ((2, 2, 8), 2)], FIXED)
    ]
    assert_cases_invariant(cases, 8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("features", (1, 2))
def test_feature_counts(mode, features):
    """The sharded dim down to one feature a rank, the other down to one in all: fewer columns than ranks for `cols`."""
    sharded, other = 8 * features, 1 if features == 1 else 3
    k, n = (other, sharded) if mode == "column" else (sharded, other)
    cases = [
        Case(mode, k, n, (8, 2), owner_map=owner_map, sequence_parallel=sp)
        for owner_map, sp in itertools.product(FIXED, (False, True))
    ]
    assert_cases_invariant(cases, 8)


@pytest.mark.parametrize("sp", (False, True))
def test_options(sp):
    """A stride that is set late, and four micro-batches; the fuzzer draws the others."""
    cases = []
    for mode, stride in itertools.product(MODES, (1, 2)):
        k, n = sizes(mode, 4, stride)
        case = Case(mode, k, n, stride=stride, sequence_parallel=sp, tokens=(4, 8), sequence_dim=stride - 1)
        cases += [case.with_(micro_batches=4), case.with_(late_stride=True)]
    assert_cases_invariant(cases, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 96, (128,)), (512, 33, (5, 7)), (53, 1024, (1,))], ids=str)
@pytest.mark.parametrize("bias", (True, False))
def test_accuracy(shape, bias, dtype):
    """Invariant and wrong must fail: against float64, beside torch's own layer."""
    k, n, tokens = shape
    check_accuracy(Case("column", k, n, tokens, dtype=dtype, bias=bias, micro_batches=1))


def differing(case: Case, degree: int) -> set[str]:
    """Names of the results whose bits at `degree` differ from TP=1's with the mode as the case has it."""
    want = run(None, case.as_reference)
    names = set()
    for got in run_ranks(run, degree, case):
        for name, value in got.items():
            try:
                assert_bitwise_equal(value, want[name])
            except AssertionError:
                names.add(name)
    return names


@pytest.mark.parametrize(
    ("mode", "sp", "split_sum"),
    [
        ("row", False, "y0"),
        ("row", True, "y0"),
        ("column", False, "dx0"),
        ("column", True, "dx0"),
        ("row", True, "d_bias"),
        (None, True, "d_weight"),
        (None, True, "d_bias"),
    ],
)
def test_negative_control(mode, sp, split_sum):
    """Each sum that the degree splits differs with the mode off and not with it on; the off path is right, too."""
    case = Case(mode, 192, 192, (64, 4), sequence_parallel=sp)
    assert split_sum in differing(case.with_(mode=False), 4)
    assert differing(case, 4) == set()
    exact = case.torch_results(torch.float64)
    for got in run_ranks(run, 4, case.with_(mode=False)):
        for name, value in exact.items():
            assert error(got[name], value) < 1e-5, name


@pytest.mark.parametrize("mode", (None, "column", "row"))
@pytest.mark.parametrize("sp", (False, True))
def test_off_mode_options_agree_with_on(mode, sp):
    """The same options mean the same on the stock path, up to rounding."""
    stride = 1 if mode is None else 2
    base = Case(mode, 32, 48, (4, 8), sequence_parallel=sp, sequence_dim=1, stride=stride)
    cases = [base, base.with_(return_bias=True), base.with_(bias=False)]
    if mode == "column":
        cases.append(base.with_(gather_output=True, return_bias=True))
    if mode == "row":
        cases.append(base.with_(input_is_parallel=False))
    off = run_ranks(run_all, 4, [case.with_(mode=False) for case in cases])
    on = [run(None, case.as_reference) for case in cases]
    for results in off:
        for got, want in zip(results, on, strict=True):
            assert got.keys() == want.keys()
            for name, value in want.items():
                if value is not None:
                    assert got[name].shape == value.shape
                    assert error(got[name], value.double()) < 1e-5, name


# --- every GEMM through gemm_fn -------------------------------------------------------------------------------------


def counted_run(tp_group, case):
    """How often a layer calls its gemm_fn, while torch's own products and adding collectives are out of bounds."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from tp_invariant.kernels.gemm.reference import matmul

    calls = []
    inside = [False]

    def counting(a, b, *, bias=None, out_dtype=None):
        calls.append((tuple(a.shape), tuple(b.shape)))
        inside[0] = True
        try:
            return matmul(a, b, bias=bias, out_dtype=out_dtype)
        finally:
            inside[0] = False

    forbidden = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name()
            products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "aten::dot", "aten::mv")
            # sums of integers are exact: the hash of the weight in a first call
            if not inside[0] and name.split(".")[0] in (*products, "aten::sum") and args[0].is_floating_point():
                forbidden.append(name)
            if "reduce" in name:  # c10d::allreduce_, c10d::reduce_scatter_, c10d::_reduce_scatter_base_
                forbidden.append(name)
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch, Watch(), torch.autograd.set_multithreading_enabled(False):
        patch.setattr("tp_invariant.layers.linear.check_first_product", lambda *args, **options: None)
        run(tp_group, case.with_(gemm_fn=counting, micro_batches=1))
    return calls, forbidden


@pytest.mark.parametrize(("mode", "norm"), [(None, None), ("column", None), ("row", None), ("column", "RMSNorm")])
def test_every_gemm_goes_through_gemm_fn(mode, norm):
    """Forward, dgrad, wgrad and the bias gradient: four calls; no torch product and no adding collective besides."""
    base = Case(mode, 32, 64, (8,), norm=norm)
    cases = [
        base.with_(owner_map=owner_map, sequence_parallel=sp)
        for owner_map, sp in itertools.product(OWNER_MAPS, (False, True))
    ]
    for results in run_ranks(lambda tp_group: [counted_run(tp_group, case) for case in cases], 4):
        for case, (calls, forbidden) in zip(cases, results, strict=True):
            assert len(calls) == 4 and forbidden == [], case


def test_the_watch_sees_the_stock_path():
    """The count above can fail: with the mode off, torch's products and adding collectives show."""
    for calls, forbidden in run_ranks(counted_run, 2, Case("row", 32, 64, (8,), mode=False)):
        assert calls == []
        assert any("mm" in name for name in forbidden) and any("allreduce" in name for name in forbidden)


# --- nn.Linear's ways -----------------------------------------------------------------------------------------------


def test_is_an_nn_linear():
    layer = tpi.Linear(8, 12)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert (layer.in_features, layer.out_features) == (8, 12)
    assert "bias" not in tpi.Linear(8, 12, bias=False).state_dict()
    with tpi.set_tp_invariant_mode(False):
        x = torch.randn(3, 8)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("mode", (None, *MODES, "norm"))
def test_outputs_can_be_changed_in_place(mode):
    """As nn.Linear's can: residual adds and in-place activations."""

    def case(tp_group, sp, sequence_dim, batch):
        with tpi.set_tp_invariant_mode(True):
            options = dict(tp_group=tp_group, sequence_parallel=sp, sequence_dim=sequence_dim)
            if mode == "norm":
                layer = tpi.LayerNormLinear(8, 16, parallel_mode="column", **options)
            else:
                layer = tpi.Linear(8, 16, parallel_mode=mode, **options)
            tokens = (batch, 4) if sequence_dim else (4, batch)
            x = (torch.randn(*tokens, layer.weight.shape[1]) + tp_group.rank()).requires_grad_()
            y = layer(x)
            y += 1
            torch.relu_(y).sum().backward()
            gathered = tpi.regions.gather_sequence(x * 1, tp_group, sequence_dim)
            gathered += 1
            return bool(torch.isfinite(x.grad).all())

    def every(tp_group):
        return [case(tp_group, *options) for options in itertools.product((False, True), (0, 1), (1, 4))]

    assert run_ranks(every, 2) == [[True] * 8] * 2 and run_ranks(every, 1) == [[True] * 8]


@pytest.mark.parametrize("replace", ("assign", "parameter", "load_assign", "swap"))
def test_a_replaced_parameter_keeps_its_marks(replace):
    layer = tpi.Linear(8, 16, parallel_mode="column")
    layer.weight.partition_stride = 2  # late
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    if replace == "assign":
        layer.weight = nn.Parameter(state["weight"])
    elif replace == "parameter":
        layer.register_parameter("weight", nn.Parameter(state["weight"]))
    elif replace == "load_assign":
        layer.load_state_dict(state, assign=True)
    else:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            layer.half()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    weight = layer.weight
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (False, 0, 2)
    assert layer.partition_stride == 2
    values = {"weight": torch.zeros(16, 8), "bias": torch.zeros(16)}
    if replace != "swap":
        assert torch.func.functional_call(layer, values, (torch.ones(2, 8),)).count_nonzero() == 0
    assert layer.partition_stride == 2


def called_with_whole_weights(tp_group):
    """Each rank would compute all of a column-parallel product, and a row-parallel layer would sum equal ones."""
    for parallel_mode in ("column", "row"):
        layer = tpi.Linear(8, 16, parallel_mode=parallel_mode, tp_group=tp_group)
        whole, own = tpi.full_state_dict(layer), {n: p.detach().clone() for n, p in layer.named_parameters()}
        x = torch.ones(2, 8 if parallel_mode == "column" else 8 // tp_group.size())
        assert torch.equal(torch.func.functional_call(layer, own, (x,)), layer(x))
        with pytest.raises(ValueError, match=rf"on rank {tp_group.rank()} has the shape \(16, 8\) of the whole weight"):
            torch.func.functional_call(layer, whole, (x,))


def test_whole_weights_in_a_functional_call_are_refused():
    run_ranks(called_with_whole_weights, 2)


@pytest.mark.parametrize("mode", MODES)
def test_from_linear(mode):
    full = nn.Linear(24, 48, dtype=torch.bfloat16).requires_grad_(False)
    full.bias.requires_grad_()
    full.eval()

    def case(tp_group):
        layer = tpi.Linear.from_linear(full, parallel_mode=mode, tp_group=tp_group, partition_stride=2)
        kept = (layer.weight.requires_grad, layer.bias.requires_grad, layer.training, layer.weight.partition_stride)
        return kept, tpi.testing.full_parameters(layer)

    for degree in (1, 2, 4):
        for kept, parameters in run_ranks(case, degree):
            assert kept == (False, True, False, 2)
            assert_bitwise_equal(parameters, {"weight": full.weight.detach(), "bias": full.bias.detach()})


@pytest.mark.parametrize(
    ("mode", "norm"), [("column", None), ("row", None), ("column", "LayerNorm"), ("column", "RMSNorm")]
)
def test_autocast(mode, norm):
    """The autocast dtype wins; gradients come back in the parameters' dtype; bits do not depend on the degree."""

    def case(tp_group):
        torch.manual_seed(0)
        options = dict(parallel_mode=mode, tp_group=tp_group)
        layer = tpi.LayerNormLinear(64, 64, normalization=norm, **options) if norm else tpi.Linear(64, 64, **options)
        x = torch.randn(6, 64, requires_grad=True)
        part = x if mode == "column" else x.tensor_split(layer.group.size, dim=1)[layer.group.rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(part)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        if mode == "column":
            return x.grad, tpi.testing.full_grads(layer)
        return y, tpi.testing.full_grads(layer)

    result = tpi.testing.assert_tp_invariant(case, degrees=(1, 2, 4), device="cpu")
    grads = [value for name, value in result.items() if "weight" in name]
    assert grads and grads[0].dtype == torch.float32


def test_prefetched_weight_is_used_until_it_changes():
    """A prefetched gather serves one forward; after an in-place change it is not used."""

    def case(tp_group):
        with tpi.set_tp_invariant_mode(True):
            torch.manual_seed(0)
            layer = tpi.Linear(64, 16, parallel_mode="row", tp_group=tp_group, owner_map="rows")
            x = torch.randn(5, 64).chunk(layer.group.size, 1)[layer.group.rank]
            plain = layer(x)
            layer.prefetch_weight()
            ahead = layer(x)
            layer.prefetch_weight()
            with torch.no_grad():
                layer.weight.mul_(3)
            stale = layer(x)
            return plain.detach(), ahead.detach(), stale.detach(), layer(x).detach()

    for plain, ahead, changed, again in run_ranks(case, 4):
        assert_bitwise_equal(ahead, plain)
        assert_bitwise_equal(changed, again)
        assert not torch.equal(changed, plain)


def test_checkpoint_recomputation_gives_the_same_bits():
    def case(tp_group, recompute):
        torch.manual_seed(0)
        layer = tpi.Linear(64, 64, parallel_mode="column", tp_group=tp_group, gather_output=True)
        x = torch.randn(6, 64, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        y.square().sum().backward()
        return y.detach(), x.grad, tpi.testing.full_grads(layer)

    with_it = tpi.testing.assert_tp_invariant(case, True, degrees=(1, 4), device="cpu")
    assert_bitwise_equal(with_it, tpi.testing.assert_tp_invariant(case, False, degrees=(1, 4), device="cpu"))


def selective(tp_group, recompute):
    torch.manual_seed(0)
    options = dict(tp_group=tp_group, sequence_parallel=True)
    up = tpi.LayerNormLinear(64, 64, parallel_mode="column", normalization="RMSNorm", **options)
    down = tpi.Linear(64, 64, parallel_mode="row", **options)
    x = torch.randn(16, 1, 64, generator=torch.Generator().manual_seed(1)).chunk(up.group.size)[up.group.rank]
    x = x.clone().requires_grad_()

    def policy(context, operator, *args, **kwargs):
        kept = str(operator) in ("aten.mul.Tensor", "aten.add.Tensor")
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    mlp = torch.nn.Sequential(up, down, tpi.ParallelNorm(64, **options))
    y = checkpoint(mlp, x, use_reentrant=False, context_fn=contexts) if recompute else mlp(x)
    y.square().sum().backward()
    whole = [tpi.regions.gather_sequence(t, tp_group, 0) for t in (y.detach(), x.grad)]
    return whole, tpi.testing.full_grads(mlp)


def test_selective_checkpointing_gives_the_same_bits():
    """It keeps what operators return inside the layers, and refuses in backward what has changed since."""
    with_it = tpi.testing.assert_tp_invariant(selective, True, degrees=(1, 4), device="cpu")
    assert_bitwise_equal(with_it, tpi.testing.assert_tp_invariant(selective, False, degrees=(1, 4), device="cpu"))


def test_backward_follows_its_forward():
    """The mode is read in forward: a backward outside the context takes the path of its forward."""

    def case(tp_group, mode):
        torch.manual_seed(0)
        layer = tpi.Linear(512, 64, parallel_mode="column", tp_group=tp_group)
        x = torch.randn(6, 512, requires_grad=True)
        with tpi.set_tp_invariant_mode(mode):
            y = layer(x)
        with tpi.set_tp_invariant_mode(not mode):
            y.square().sum().backward()
        return x.grad

    on, off = (run_ranks(case, 4, mode)[0] for mode in (True, False))
    assert_bitwise_equal(on, run_ranks(case, 1, True)[0])
    assert not torch.equal(on, off)


# --- data that must not spread --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize(
    ("kind", "mode"), [(tpi.Linear, "column"), (tpi.Linear, "row"), (tpi.LayerNormLinear, "column")]
)
def test_nonfinite_values_stay_in_their_rows(kind, mode, value):
    def case(tp_group):
        with tpi.set_tp_invariant_mode(True):
            torch.manual_seed(0)
            layer = kind(64, 64, parallel_mode=mode, tp_group=tp_group, gather_output=mode == "column")
            x = torch.randn(9, 64)
            clean = x.clone()
            x[4, 37] = value
            part = slice(None) if mode == "column" else slice(layer.group.rank * 16, layer.group.rank * 16 + 16)
            return layer(x[:, part]).detach(), layer(clean[:, part]).detach()

    for got, clean in run_ranks(case, 4):
        assert not torch.isfinite(got[4]).any()
        rest = [i for i in range(9) if i != 4]
        assert_bitwise_equal(got[rest], clean[rest])


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(parallel_mode="diagonal"), r"parallel_mode='diagonal' is unknown: choose one of None, 'column', 'row'"),
        (dict(owner_map="all"), r"owner_map='all' is unknown: choose one of 'auto', 'replicate', 'rows', 'cols'"),
        (dict(gather_output=True), r"gather_output=True needs parallel_mode='column', not None"),
        (dict(input_is_parallel=False), r"input_is_parallel=False needs parallel_mode='row', not None"),
        (dict(parallel_mode="column", partition_stride=0), r"partition_stride=0 is not a positive integer"),
        (
            dict(parallel_mode="column", partition_stride=5),
            "out_features=12 is not divisible by TP degree=1 times partition_stride=5",
        ),
        (
            dict(parallel_mode="row", partition_stride=3),
            "in_features=8 is not divisible by TP degree=1 times partition_stride=3",
        ),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        tpi.Linear(8, 12, **options)


def test_sizes_that_the_degree_does_not_divide():
    def build(tp_group, mode):
        tpi.Linear(10, 10, parallel_mode=mode, tp_group=tp_group)

    for mode, name in (("column", "out_features"), ("row", "in_features")):
        with pytest.raises(RankError, match=f"{name}=10 is not divisible by TP degree=4") as caught:
            run_ranks(build, 4, mode)
        assert len(caught.value.errors) == 4


@pytest.mark.parametrize("enabled", (True, False))
@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        (
            torch.randn(2, 7),
            {},
            ValueError,
            r"x of Linear\(8, 12, None\) on rank 0 has shape \(2, 7\): it must be \[\.\., 8\]",
        ),
        (torch.randn(8), {}, ValueError, r"x of .* on rank 0 has shape \(8,\)"),
        (
            torch.randn(2, 8).bfloat16(),
            {},
            TypeError,
            r"x of .* on rank 0 is torch.bfloat16, and its weight torch.float32",
        ),
        (torch.randn(2, 8), dict(sequence_parallel=True, sequence_dim=1), ValueError, r"sequence_dim=1 is not a token"),
        (torch.randn(2, 8), dict(sequence_parallel=True, sequence_dim=-1), ValueError, r"sequence_dim=-1 is not a"),
    ],
)
def test_forward_errors(x, options, kind, message, enabled):
    for layer in (tpi.Linear(8, 12, **options), tpi.LayerNormLinear(8, 12, **options)):
        of_it = message.replace("Linear", type(layer).__name__)
        with tpi.set_tp_invariant_mode(enabled), pytest.raises(kind, match=of_it):
            layer(x)


def test_unsupported_dtype():
    layer = tpi.Linear(8, 12, dtype=torch.float64)
    message = r"x on rank 0 is torch.float64: the bundled kernels take torch.bfloat16, torch.float16, torch.float32"
    with tpi.set_tp_invariant_mode(True), pytest.raises(TypeError, match=message):
        layer(torch.randn(2, 8, dtype=torch.float64))


def narrow_inputs(tp_group):
    """What layers say to the part of an input where they take the whole, and the other way round."""
    up, down = (tpi.Linear(8, 8, parallel_mode=mode, tp_group=tp_group) for mode in ("column", "row"))
    texts = []
    for layer, x in ((up, torch.ones(2, 4)), (down, torch.ones(2, 8)), (tpi.Linear(8, 8), torch.ones(2, 4))):
        with pytest.raises(ValueError) as caught:
            layer(x)
        texts.append(str(caught.value))
    return texts


def test_parts_and_whole_inputs_that_are_mistaken_for_each_other():
    for part, whole, also_part in run_ranks(narrow_inputs, 2):
        assert "set gather_output=True there" in part and "set gather_output=True there" in also_part
        assert "x has all features: set input_is_parallel=False" in whole


def test_a_parameter_has_its_name_in_the_model():
    model = tpi.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), None, {"0": "colwise"})
    with pytest.raises(ValueError, match=r"^x of 0, a Linear\(4, 4, 'column'\), on rank 0 has shape \(2, 3\)"):
        model(torch.ones(2, 3))
    model[0].weight.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(TypeError, match=r"the gradient of 0\.weight \(parameter 0\)"):
        tpi.clip_grad_norm_(model.parameters(), 1.0)


def test_sequence_that_the_degree_does_not_divide():
    def forward(tp_group):
        tpi.Linear(8, 12, parallel_mode="row", tp_group=tp_group, sequence_parallel=True)(torch.randn(7, 2))

    text = (
        r"has shape \(7, 2\), of which sequence parallelism takes dim 0 .*size 7 is not divisible by TP degree=4\. Pad"
    )
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(forward, 4)
    assert len(caught.value.errors) == 4


# --- the log --------------------------------------------------------------------------------------------------------


def test_the_stock_path_says_so_once(caplog):
    def record(tp_group):
        records = []
        handler = logging.Handler()
        handler.emit = lambda r: records.append((r.levelname, r.getMessage()))
        logger = logging.getLogger("tp_invariant.functional.stock")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        stock._logged = False
        with tpi.set_tp_invariant_mode(False):
            layer = tpi.Linear(8, 12, parallel_mode="row", tp_group=tp_group)
            for _ in range(2):
                layer(torch.randn(3, 8 // layer.group.size) + tp_group.rank())
        logger.removeHandler(handler)
        return records

    for records in run_ranks(record, 2):
        assert len(records) == 1
        assert records[0][0] == "INFO" and "TP-invariant mode is off" in records[0][1]
    assert run_ranks(record, 1) == [[]]
