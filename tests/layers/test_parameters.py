"""Parameters: Megatron's attributes, the way to full tensors and back, and values that do not depend on the degree."""

import copy
import io
import pickle

import pytest
import torch
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group, gather_major
from tp_invariant.layers.parameters import is_sharded, mark_sharded
from tp_invariant.testing import assert_bitwise_equal, full_grads, full_parameters

ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")
DEGREES = (1, 2, 4)


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


# whether it is sharded on a group of several ranks, partition_dim, partition_stride
ON_RANKS = {
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
    "rms.weight": (False, 0, 1),  # built without a group
    "rms.layer_norm_weight": (False, -1, 1),
}
MARKS = {name: (False, *rest) for name, (_, *rest) in ON_RANKS.items()}


def ours(model):
    return nn.ModuleDict({name: child for name, child in model.items() if name != "other"})


# --- attributes -----------------------------------------------------------------------------------------------------


def test_parameters_are_marked():
    assert attributes(ours(build())) == MARKS


def carried(module, tp_group):
    """Names of the parameters that carry this process group, and of those that carry none."""
    found = {None: [], tp_group: []}
    for name, parameter in module.named_parameters():
        found[parameter.tp_group and parameter.tp_group.process_group].append(name)
    return found[tp_group], found[None]


def with_marks(tp_group, module):
    assert attributes(module) == ON_RANKS
    with_group, without = carried(module, tp_group)
    assert without == ["rms.weight", "rms.layer_norm_weight"]
    assert with_group == [name for name in ON_RANKS if name not in without]


def replaced(model, how):
    for layer in model.values():
        for name in list(layer._parameters):
            if layer._parameters[name] is not None:
                old = getattr(layer, name)
                if how == "after del":
                    delattr(layer, name)
                setattr(layer, name, nn.Parameter(old.detach().clone()))
                assert getattr(layer, name) is not old
    return model


def assigned(model, tp_group):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    twin = ours(build(tp_group, device="meta"))
    twin.load_state_dict(state, assign=True)
    return twin


def test_parameters_carry_their_group_wherever_new_ones_come_from():
    def on_rank(tp_group):
        def new():
            return ours(build(tp_group))

        with_marks(tp_group, new())
        with_marks(tp_group, ours(build(tp_group, device="meta")).to_empty(device="cpu"))
        with_marks(tp_group, new().to(torch.bfloat16))
        with_marks(tp_group, copy.deepcopy(new()))
        with_marks(tp_group, assigned(new(), tp_group))
        with_marks(tp_group, replaced(new(), "over"))
        with_marks(tp_group, replaced(new(), "after del"))
        for setting in ("overwrite", "swap"):
            switch = getattr(torch.__future__, f"set_{setting}_module_params_on_conversion")
            switch(True)
            try:
                with_marks(tp_group, new().double())
            finally:
                switch(False)

    run_ranks(on_rank, 2)


def test_parameters_and_modules_can_be_pickled():
    def on_rank(tp_group):
        model = ours(build(tp_group))
        with_marks(tp_group, pickle.loads(pickle.dumps(model)))
        buffer = io.BytesIO()
        torch.save(dict(model.named_parameters()), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert {n: p.tp_group == model.get_parameter(n).tp_group for n, p in loaded.items()} == dict.fromkeys(
            MARKS, True
        )
        return buffer.getvalue()

    raw = run_ranks(on_rank, 2)[1]
    elsewhere = torch.load(io.BytesIO(raw), weights_only=True)["column.weight"].tp_group
    assert (elsewhere.rank, elsewhere.size) == (1, 2)
    again = pickle.loads(pickle.dumps(copy.deepcopy(elsewhere)))
    for group in (elsewhere, again):
        with pytest.raises(ValueError, match=r"the global ranks \[0, 1\]; this process has no such group"):
            gather_major(torch.zeros(2), group)


def test_marking_by_hand():
    p = nn.Parameter(torch.zeros(2, 2))
    mark_sharded(p, 1, 3)  # as Megatron's own layers do: no word of the group
    assert (is_sharded(p), p.partition_dim, p.partition_stride, p.tp_group) == (True, 1, 3, None)
    mark_sharded(p, 1, 3, Group(None, 0, 1))
    assert (is_sharded(p), p.partition_dim, p.partition_stride, p.tp_group) == (False, 1, 3, None)


def test_deepcopy_keeps_a_stride_that_was_set_late():
    layer = tpi.Linear(6, 16, parallel_mode="column")
    layer.weight.partition_stride = 4
    twin = copy.deepcopy(nn.Sequential(layer))[0]
    assert twin.weight is not layer.weight
    assert (twin.weight.partition_stride, twin.partition_stride) == (4, 4)
    assert_bitwise_equal(twin.weight, layer.weight)
    twin.weight.partition_stride = 2
    assert layer.partition_stride == 4, "the copy has attributes of its own"


@pytest.mark.parametrize("stride", [0, -1, 1.0, "2", True])
def test_a_late_stride_that_is_no_positive_integer(stride):
    layer = tpi.Linear(6, 16, parallel_mode="column")
    layer.weight.partition_stride = stride
    with pytest.raises(ValueError, match=f"^partition_stride={stride!r} is not a positive integer$"):
        _ = layer.partition_stride


def test_a_late_stride_that_does_not_divide():
    layer = tpi.Linear(6, 16, parallel_mode="column")
    layer.weight.partition_stride = 3
    text = "out_features=16 is not divisible by TP degree=1 times partition_stride=3"
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
