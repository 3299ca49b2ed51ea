"""Parameters: Megatron's attributes, the way to full tensors and back, and values that do not depend on the degree."""

import copy
import functools

import pytest
import torch
from torch import nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.parameters import named_shard_specs
from tp_invariant.testing import assert_bitwise_equal, full_grads, full_parameters

run_ranks = functools.partial(testing.run_ranks, device="cpu")

ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")
DEGREES = (1, 2, 4)


@pytest.fixture(scope="session", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, 8)


def attributes(module):
    return {
        name: tuple(getattr(parameter, attribute) for attribute in ATTRIBUTES)
        for name, parameter in module.named_parameters()
    }


def build(tp_group=None, **options):
    """One layer of each kind."""
    return nn.ModuleDict(
        {
            "column": tpi.Linear(6, 16, parallel_mode="column", partition_stride=2, tp_group=tp_group, **options),
            "row": tpi.Linear(16, 6, parallel_mode="row", tp_group=tp_group, **options),
            "whole": tpi.Linear(6, 5, tp_group=tp_group, **options),
            "norm": tpi.LayerNormLinear(6, 8, parallel_mode="column", tp_group=tp_group, **options),
            "rms": tpi.LayerNormLinear(6, 8, parallel_mode="column", normalization="RMSNorm", bias=False, **options),
            "other": nn.Linear(6, 3, **options),
        }
    )


MARKS = {
    "column.weight": (True, 0, 2),
    "column.bias": (True, 0, 2),
    "row.weight": (True, 1, 1),
    "row.bias": (False, -1, 1),
    "whole.weight": (False, -1, 1),
    "whole.bias": (False, -1, 1),
    "norm.weight": (True, 0, 1),
    "norm.bias": (True, 0, 1),
    "norm.layer_norm_weight": (False, -1, 1),
    "norm.layer_norm_bias": (False, -1, 1),
    "rms.weight": (True, 0, 1),
    "rms.layer_norm_weight": (False, -1, 1),
}


def ours(model):
    return nn.ModuleDict({name: child for name, child in model.items() if name != "other"})


# --- attributes -----------------------------------------------------------------------------------------------------


def test_parameters_are_marked():
    assert attributes(ours(build())) == MARKS


def test_marks_do_not_depend_on_the_degree():
    assert run_ranks(lambda tp_group: attributes(ours(build(tp_group))), 2) == [MARKS] * 2


def test_meta_then_to_empty_keeps_the_marks():
    model = ours(build(device="meta"))
    assert all(p.is_meta for p in model.parameters())
    before = list(model.parameters())
    model.to_empty(device="cpu")
    for old, new in zip(before, model.parameters(), strict=True):
        assert old is not new, "torch was to make new parameters here"
    assert attributes(model) == MARKS


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.double(), copy.deepcopy])
def test_conversions_keep_the_marks(convert):
    assert attributes(convert(ours(build()))) == MARKS


def test_deepcopy_keeps_a_stride_that_was_set_late():
    layer = tpi.Linear(6, 16, parallel_mode="column")
    layer.weight.partition_stride = 4
    twin = copy.deepcopy(nn.Sequential(layer))[0]
    assert twin.weight is not layer.weight
    assert (twin.weight.partition_stride, twin.partition_stride) == (4, 4)
    assert_bitwise_equal(twin.weight, layer.weight)
    twin.weight.partition_stride = 2
    assert layer.partition_stride == 4, "the copy has attributes of its own"


def test_deepcopy_of_a_tied_parameter_stays_tied():
    model = nn.ModuleList([tpi.Linear(6, 6, bias=False), tpi.Linear(6, 6, bias=False)])
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not model[0].weight


@pytest.mark.parametrize("stride", [0, -1, 1.0, "2", True])
def test_a_late_stride_that_is_no_positive_integer(stride):
    layer = tpi.Linear(6, 16, parallel_mode="column")
    layer.weight.partition_stride = stride
    with pytest.raises(ValueError, match=f"^partition_stride={stride!r} is not a positive integer$"):
        _ = layer.partition_stride


def test_a_late_stride_that_does_not_divide():
    layer = tpi.Linear(6, 16, parallel_mode="column")
    layer.weight.partition_stride = 3
    text = "this rank's part of out_features=16 is not divisible by weight.partition_stride=3"
    with pytest.raises(ValueError, match=f"^{text}"):
        _ = layer.partition_stride


# --- full tensors and back ------------------------------------------------------------------------------------------


def test_full_parameters_and_gradients_by_hand():
    """Shards numbered by rank, so that what comes back can be written down."""

    def on_rank(tp_group):
        rank = tp_group.rank()
        column = tpi.Linear(2, 8, parallel_mode="column", partition_stride=2, tp_group=tp_group)
        row = tpi.Linear(4, 2, parallel_mode="row", tp_group=tp_group)
        model = nn.Sequential(column, row)
        with torch.no_grad():
            column.weight.copy_(torch.tensor([10.0, 11.0, 20.0, 21.0]).add(2 * rank).unsqueeze(1).expand(4, 2))
            column.bias.fill_(rank)
            row.weight.copy_(torch.tensor([[0.0, 1.0]]).add(2 * rank).expand(2, 2))
            row.bias.copy_(torch.tensor([5.0, 6.0]))
        for parameter in (column.weight, row.weight):
            parameter.grad = -parameter.detach()
        return full_parameters(model), full_grads(model)

    for parameters, grads in run_ranks(on_rank, 2):
        weight = torch.tensor([10.0, 11, 12, 13, 20, 21, 22, 23]).unsqueeze(1).expand(8, 2)
        assert_bitwise_equal(
            parameters,
            {
                "0.weight": weight,
                "0.bias": torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1]),
                "1.weight": torch.tensor([[0.0, 1, 2, 3]]).expand(2, 4),
                "1.bias": torch.tensor([5.0, 6.0]),
            },
        )
        expected = {"0.weight": -weight, "0.bias": None, "1.weight": -parameters["1.weight"], "1.bias": None}
        assert_bitwise_equal(grads, expected)


def test_full_parameters_are_copies():
    layer = tpi.Linear(4, 4)
    for tensor in full_parameters(layer).values():
        assert not tensor.requires_grad
        tensor.zero_()
    assert layer.weight.abs().sum() > 0


@pytest.mark.parametrize("world", [1, 2])
def test_local_and_full_undo_each_other(world):
    def on_rank(tp_group):
        specs = list(named_shard_specs(build(tp_group)))
        for _, parameter, spec in specs:
            assert_bitwise_equal(spec.local(spec.full(parameter)), parameter.detach())
        return [name for name, _, _ in specs]

    names = [name for name, _ in build().named_parameters()]
    assert run_ranks(on_rank, world) == [names] * world


def test_a_stride_set_late_is_read_late():
    def on_rank(tp_group):
        layer = tpi.Linear(2, 8, bias=False, parallel_mode="column", tp_group=tp_group)
        layer.weight.partition_stride = 2
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([10.0, 11, 20, 21]).add(2 * tp_group.rank()).unsqueeze(1).expand(4, 2))
        return full_parameters(layer)["weight"][:, 0]

    for weight in run_ranks(on_rank, 2):
        assert weight.tolist() == [10.0, 11, 12, 13, 20, 21, 22, 23]


# --- initialisation -------------------------------------------------------------------------------------------------


def stock_values(seed, *shapes):
    """What nn.Linear draws, one layer after the other, for a seed."""
    torch.manual_seed(seed)
    return [nn.Linear(*shape).state_dict() for shape in shapes]


@pytest.mark.parametrize("world", DEGREES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("how", ["constructed", "meta"])
def test_initial_values_are_those_of_nn_linear(world, stride, how):
    def on_rank(tp_group):
        device = "meta" if how == "meta" else None
        torch.manual_seed(11)
        options = {"tp_group": tp_group, "device": device}
        model = nn.ModuleList(
            [
                tpi.Linear(6, 16, parallel_mode="column", partition_stride=stride, **options),
                tpi.Linear(16, 6, parallel_mode="row", partition_stride=stride, **options),
                tpi.Linear(6, 5, **options),
            ]
        )
        if how == "meta":
            model.to_empty(device="cpu")
            torch.manual_seed(11)
            for layer in model:
                layer.reset_parameters()
        return full_parameters(model), torch.get_rng_state()

    stock = stock_values(11, (6, 16), (16, 6), (6, 5))
    expected = {f"{i}.{name}": value for i, state in enumerate(stock) for name, value in state.items()}
    state = torch.get_rng_state()
    for values, state_after in run_ranks(on_rank, world):
        assert_bitwise_equal(values, expected)
        assert_bitwise_equal(state_after, state, "the generator's state after drawing")


@pytest.mark.parametrize("world", DEGREES)
def test_values_drawn_again_after_a_late_stride(world):
    def on_rank(tp_group):
        layer = tpi.Linear(6, 16, parallel_mode="column", tp_group=tp_group)
        layer.weight.partition_stride = 2
        torch.manual_seed(3)
        layer.reset_parameters()
        return full_parameters(layer)

    (expected,) = stock_values(3, (6, 16))
    for values in run_ranks(on_rank, world):
        assert_bitwise_equal(values, dict(expected))


@pytest.mark.parametrize("world", DEGREES)
@pytest.mark.parametrize("parallel_mode", [None, "column", "row"])
def test_init_method_gets_the_full_weight(world, parallel_mode):
    def on_rank(tp_group):
        shapes = []

        def init(weight):
            shapes.append(tuple(weight.shape))
            weight.copy_(torch.arange(float(weight.numel())).view(weight.shape))

        layer = tpi.Linear(8, 12, parallel_mode=parallel_mode, tp_group=tp_group, init_method=init)
        return shapes, full_parameters(layer)["weight"]

    for shapes, weight in run_ranks(on_rank, world):
        assert shapes == [(12, 8)]
        assert_bitwise_equal(weight, torch.arange(96.0).view(12, 8))


@pytest.mark.parametrize("world", DEGREES)
def test_layer_norm_linear_starts_as_the_identity(world):
    def on_rank(tp_group):
        torch.manual_seed(5)
        plain = tpi.LayerNormLinear(6, 8, parallel_mode="column", tp_group=tp_group)
        centered = tpi.LayerNormLinear(6, 8, parallel_mode="column", zero_centered_gamma=True, tp_group=tp_group)
        meta = tpi.LayerNormLinear(6, 8, parallel_mode="column", tp_group=tp_group, device="meta").to_empty(
            device="cpu"
        )
        torch.manual_seed(5)
        meta.reset_parameters()
        return full_parameters(plain), full_parameters(centered), full_parameters(meta)

    first, _ = stock_values(5, (6, 8), (6, 8))
    for plain, centered, meta in run_ranks(on_rank, world):
        norm = {"layer_norm_weight": torch.ones(6), "layer_norm_bias": torch.zeros(6)}
        assert_bitwise_equal(plain, {**first, **norm})
        assert_bitwise_equal(meta, plain)
        assert_bitwise_equal(centered["layer_norm_weight"], torch.zeros(6))


def test_dtypes_draw_in_their_own_precision():
    torch.manual_seed(1)
    expected = nn.Linear(6, 16, dtype=torch.bfloat16).state_dict()
    torch.manual_seed(1)
    layer = tpi.Linear(6, 16, dtype=torch.bfloat16, parallel_mode="column")
    assert_bitwise_equal(full_parameters(layer), dict(expected))
