"""LayerNormLinear: the contract as a matrix, accuracy, negative controls and what bad input gets."""

from __future__ import annotations

import itertools

import pytest
import torch
from layer_cases import Case, assert_cases_invariant, check_accuracy, run
from torch import nn

import tp_invariant as tpi
from tp_invariant.functional.norm import ROWS_PER_SUM
from tp_invariant.testing import assert_bitwise_equal, run_ranks

NORMS = ("LayerNorm", "RMSNorm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEGREES = (2, 3, 4, 8)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("norm", NORMS)
def test_matrix(norm, degree):
    """SP x stride x owner map; leaves of tokens that ranks hold whole and that they share; each at every degree.

    On four and eight ranks each pair of the first three (see test_linear.py).
    Zero-centered gamma and dtype are dealt out: over the degrees each case has both and all three.
    """
    cases = []
    for stride, (i, owner_map) in itertools.product((1, 2), enumerate(("replicate", "rows", "cols"))):
        base = Case("column", 53, degree * stride * 5, (11,), norm=norm, stride=stride, owner_map=owner_map)
        layouts = [
            base,
            base.with_(sequence_parallel=True, tokens=(degree * 3, 5)),  # leaves cross ranks
            base.with_(sequence_parallel=True, tokens=(3, degree * 2), sequence_dim=1),
        ]
        cases += [case for j, case in enumerate(layouts) if degree < 4 or (stride + i + j) % 2]
    base = Case("column", 37, degree * 6, (1,), norm=norm, sequence_parallel=True)
    cases += [
        base.with_(tokens=(degree * ROWS_PER_SUM,)),  # a leaf a rank
        base.with_(tokens=(degree * ROWS_PER_SUM // 8, 2, 4)),
        base.with_(tokens=(3, degree * ROWS_PER_SUM), sequence_dim=1),
        base.with_(tokens=(2, degree * ROWS_PER_SUM // 4, 8), sequence_dim=1),
        base.with_(tokens=(degree,)),
        base.with_(tokens=(0, 3)),
        base.with_(sequence_parallel=False),
    ]
    dealt = []
    for i, case in enumerate(cases):
        deal = DEGREES.index(degree) + i + i // 3
        dealt.append(case.with_(zero_centered=deal % 2 == 0, dtype=DTYPES[deal % 3]))
    assert_cases_invariant(dealt, degree)


@pytest.mark.parametrize("norm", NORMS)
def test_options(norm):
    """What the fuzzer does not draw: late strides and micro-batches, and what a whole layer returns."""
    cases = []
    for sp, dim in itertools.product((False, True), (0, 1)):
        base = Case("column", 37, 24, (4, 8), norm=norm, sequence_parallel=sp, sequence_dim=dim)
        cases += [
            base.with_(bias=False, late_stride=True, stride=3),
            base.with_(parallel_mode=None, return_norm=True, return_norm_gathered=True),
            base.with_(micro_batches=4),
        ]
    assert_cases_invariant(cases, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_centered", (False, True))
@pytest.mark.parametrize("norm", NORMS)
def test_accuracy(norm, zero_centered, dtype):
    check_accuracy(Case("column", 512, 96, (70,), dtype=dtype, norm=norm, zero_centered=zero_centered, micro_batches=1))


@pytest.mark.parametrize("norm", NORMS)
def test_negative_control(norm):
    """gamma's and beta's gradients under SP, and dgrad behind the norm, differ with the mode off."""
    case = Case("column", 96, 192, (128, 2), norm=norm, sequence_parallel=True, mode=False)
    want = run(None, case.as_reference)
    names = {"dx0", "d_layer_norm_weight"} | ({"d_layer_norm_bias"} if norm == "LayerNorm" else set())
    for got in run_ranks(run, 4, case):
        for name in names:
            assert not torch.equal(got[name], want[name]), name
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-2)


def test_off_mode_without_sequence_parallelism_is_torch():
    torch.manual_seed(0)
    layer = tpi.LayerNormLinear(16, 24, normalization="LayerNorm")
    torch.nn.init.normal_(layer.layer_norm_weight)
    x = torch.randn(5, 16)
    with tpi.set_tp_invariant_mode(False):
        normed = nn.functional.layer_norm(x, (16,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)
        assert torch.equal(layer(x), nn.functional.linear(normed, layer.weight, layer.bias))


def test_state_dict_and_defaults():
    layer = tpi.LayerNormLinear(8, 12)
    assert set(layer.state_dict()) == {"weight", "bias", "layer_norm_weight", "layer_norm_bias"}
    assert_bitwise_equal(layer.layer_norm_weight.detach(), torch.ones(8))
    assert_bitwise_equal(layer.layer_norm_bias.detach(), torch.zeros(8))
    rms = tpi.LayerNormLinear(8, 12, normalization="RMSNorm", zero_centered_gamma=True, bias=False)
    assert set(rms.state_dict()) == {"weight", "layer_norm_weight"}
    assert_bitwise_equal(rms.layer_norm_weight.detach(), torch.zeros(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(parallel_mode="row"), r"parallel_mode='row' is impossible for LayerNormLinear .*: use 'column' or None"),
        (dict(normalization="BatchNorm"), r"normalization='BatchNorm' is unknown: choose 'LayerNorm' or 'RMSNorm'"),
        (dict(return_layernorm_output_gathered=True), r"needs return_layernorm_output=True"),
        (dict(parallel_mode="diagonal"), r"parallel_mode='diagonal' is unknown"),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        tpi.LayerNormLinear(8, 12, **options)
