"""The gradient norm and clipping: the same bits at every degree and on every rank, and torch's values."""

import functools
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.collectives import resolve_group
from tp_invariant.kernels import reference
from tp_invariant.layout import shard, unshard
from tp_invariant.parameters import mark_sharded
from tp_invariant.testing import assert_bitwise_equal, wide_randn

run_ranks = functools.partial(testing.run_ranks, device="cpu")

# name: (shape, sharded dim or None, partition_stride); every size divides by 8 x stride, and so by 3 where it is 48
PARAMETERS = {
    "column.weight": ((96, 40), 0, 1),
    "column.bias": ((96,), 0, 1),
    "gated.weight": ((96, 24), 0, 2),
    "gated.bias": ((96,), 0, 2),
    "row.weight": ((20, 144), 1, 1),
    "row.bias": ((20,), None, 1),
    "split.weight": ((7, 144), 1, 3),
    "norm.weight": ((40,), None, 1),
    "router.weight": ((5, 40), None, 1),
    "temperature": ((), None, 1),
    "expert.weight": ((6, 48, 5), 1, 1),
}
DEGREES = (1, 2, 3, 4, 8)


@pytest.fixture(scope="session", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, 8)


def full_gradients(dtype=torch.float32, scale=1.0, spread=6):
    generator = torch.Generator().manual_seed(0)
    return {
        name: (wide_randn(*shape, generator=generator, spread=spread) * scale).to(dtype)
        for name, (shape, _, _) in PARAMETERS.items()
    }


def parameters_of(gradients, tp_group):
    """Parameters with this rank's part of each gradient; one has none."""
    group = resolve_group(tp_group)
    made = {}
    for name, grad in gradients.items():
        _, dim, stride = PARAMETERS[name]
        if dim is not None:
            grad = shard(grad, dim=dim, rank=group.rank, world=group.size, stride=stride)
        made[name] = torch.nn.Parameter(torch.zeros_like(grad))
        made[name].grad = grad.clone()
        mark_sharded(made[name], dim, stride)
    made["frozen"] = torch.nn.Parameter(torch.zeros(3))
    return made


def clip_on_ranks(world, gradients, max_norm, mode=True, **options):
    """[(total norm, this rank's gradients after clipping)] in rank order."""

    def on_rank(tp_group):
        made = parameters_of(gradients, tp_group)
        with tpi.set_tp_invariant_mode(mode):
            total = tpi.clip_grad_norm_(made.values(), max_norm, tp_group=tp_group, **options)
        assert made.pop("frozen").grad is None
        return total, {name: p.grad for name, p in made.items()}

    return run_ranks(on_rank, world)


def unsharded(results):
    """The full gradients from all ranks' parts; whole ones must be alike on all ranks."""
    full = {}
    for name, (_, dim, stride) in PARAMETERS.items():
        parts = [grads[name] for _, grads in results]
        if dim is None:
            for part in parts[1:]:
                assert_bitwise_equal(part, parts[0], name)
        full[name] = parts[0] if dim is None else unshard(parts, dim=dim, stride=stride)
    return full


def torchs(gradients, max_norm, **options):
    """What torch.nn.utils gives for the full parameters, in float64."""
    made = [torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float64)) for g in gradients.values()]
    for parameter, grad in zip(made, gradients.values(), strict=True):
        parameter.grad = grad.double()
    total = torch.nn.utils.clip_grad_norm_(made, max_norm, **options)
    return total, {name: p.grad for name, p in zip(gradients, made, strict=True)}


# --- invariance and correctness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_at_every_degree(dtype, norm_type):
    gradients = full_gradients(dtype)
    reference_total = reference_grads = None
    for world in DEGREES:
        results = clip_on_ranks(world, gradients, 1.0, norm_type=norm_type)
        assert len(results) == world
        grads = unsharded(results)
        if reference_total is None:
            reference_total, reference_grads = results[0][0], grads
        for rank, (total, _) in enumerate(results):
            assert_bitwise_equal(total, reference_total, f"total norm on rank {rank} of {world}")
        assert_bitwise_equal(grads, reference_grads, f"TP={world}")


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("world", DEGREES)
def test_against_torch_on_the_full_parameters(world, mode):
    gradients = full_gradients()
    expected, expected_grads = torchs(gradients, 1.0)
    results = clip_on_ranks(world, gradients, 1.0, mode)
    for total, _ in results:
        assert total.shape == ()
        assert total.dtype == torch.float32
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    for name, grad in unsharded(results).items():
        torch.testing.assert_close(grad.double(), expected_grads[name], rtol=1e-6, atol=0, msg=name)


def test_stacked_parts_are_folded_in_the_order_of_one_rank():
    """Many norms of one gated gradient, one value a row: most see the order of the rows, as the control shows."""
    generator = torch.Generator().manual_seed(1)
    gradients = [wide_randn(192, 1, generator=generator, spread=2) for _ in range(30)]

    def on_rank(tp_group, gradients):
        group = resolve_group(tp_group)
        totals = []
        for grad in gradients:
            p = torch.nn.Parameter(torch.zeros(192 // group.size, 1))
            mark_sharded(p, 0, 2)
            p.grad = shard(grad, dim=0, rank=group.rank, world=group.size, stride=2)
            with tpi.set_tp_invariant_mode(True):
                totals.append(tpi.clip_grad_norm_(p, 1.0, tp_group=tp_group))
        return torch.stack(totals)

    (expected,) = run_ranks(on_rank, 1, gradients)
    for world in (2, 4, 8):
        for totals in run_ranks(on_rank, world, gradients):
            assert_bitwise_equal(totals, expected, f"TP={world}")
    rank_order = torch.cat([shard(torch.arange(192), dim=0, rank=r, world=4, stride=2) for r in range(4)])
    (other,) = run_ranks(on_rank, 1, [grad[rank_order] for grad in gradients])
    assert not torch.equal(other, expected)


def test_with_the_mode_off_the_bits_depend_on_the_degree():
    """The control: on data like this the stock norm differs between degrees, so the test of equality can fail."""
    totals = {float(clip_on_ranks(world, full_gradients(), 1.0, mode=False)[0][0]) for world in DEGREES}
    assert len(totals) > 1


def test_bfloat16_gradients_are_squared_in_fp32():
    gradients = full_gradients(torch.bfloat16)
    expected, _ = torchs(gradients, 1.0)
    for total, _ in clip_on_ranks(2, gradients, 1.0):
        assert total.dtype == torch.float32
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("world", [1, 4])
def test_whole_parameters_count_once(world, mode):
    def on_rank(tp_group):
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        with tpi.set_tp_invariant_mode(mode):
            return tpi.clip_grad_norm_([p], 10.0, tp_group=tp_group)

    assert [total.item() for total in run_ranks(on_rank, world)] == [5.0] * world


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_sharded_and_whole_by_hand(mode):
    def on_rank(tp_group):
        sharded, whole = torch.nn.Parameter(torch.zeros(1, 2)), torch.nn.Parameter(torch.zeros(1))
        mark_sharded(sharded, 0, 1)
        sharded.grad = torch.tensor([[2.0, 2.0 * tp_group.rank()]])  # 4 + 8 over both ranks
        whole.grad = torch.tensor([2.0])
        with tpi.set_tp_invariant_mode(mode):
            return tpi.clip_grad_norm_([sharded, whole], 1.0, tp_group=tp_group), sharded.grad, whole.grad

    for rank, (total, sharded, whole) in enumerate(run_ranks(on_rank, 2)):
        assert total.item() == 4.0
        coefficient = torch.clamp(1.0 / (torch.tensor(4.0) + 1e-6), max=1.0)
        assert_bitwise_equal(sharded, torch.tensor([[2.0, 2.0 * rank]]) * coefficient)
        assert_bitwise_equal(whole, torch.tensor([2.0]) * coefficient)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_inf_norm_is_the_largest_absolute_value(world):
    gradients = full_gradients()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for total, _ in clip_on_ranks(world, gradients, 1.0, norm_type=math.inf):
        assert total.item() == largest


def test_the_largest_may_stand_on_any_rank():
    for place in range(3):

        def on_rank(tp_group, place=place):
            p = torch.nn.Parameter(torch.zeros(2))
            mark_sharded(p, 0, 1)
            p.grad = torch.tensor([1.0, -7.0 if tp_group.rank() == place else 2.0])
            return tpi.clip_grad_norm_(p, 100.0, tp_group=tp_group, norm_type=math.inf).item()

        assert run_ranks(on_rank, 3) == [7.0] * 3


# --- what is left alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_below_the_norm_keep_their_bytes(mode, dtype):
    gradients = full_gradients(dtype, scale=1e-3, spread=3)
    gradients["norm.weight"][:3] = torch.tensor([-0.0, 0.0, 6e-8])
    results = clip_on_ranks(2, gradients, 1e6, mode)
    assert_bitwise_equal(unsharded(results), gradients)


def test_clipped_gradients_have_the_norm():
    results = clip_on_ranks(2, full_gradients(), 0.25)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in unsharded(results).values()))
    assert norm == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("parameters", [[], [torch.nn.Parameter(torch.ones(2))]])
def test_no_gradients(parameters):
    total = tpi.clip_grad_norm_(parameters, 1.0, tp_group=None)
    assert_bitwise_equal(total, torch.tensor(0.0))


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_empty_gradients_count_nothing(mode, norm_type):
    empty, full = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.zeros(1))
    empty.grad, full.grad = torch.zeros(0, 3), torch.tensor([3.0])
    with tpi.set_tp_invariant_mode(mode):
        assert tpi.clip_grad_norm_([empty, full], 1.0, tp_group=None, norm_type=norm_type).item() == 3.0


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_only_empty_gradients(mode, norm_type):
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    with tpi.set_tp_invariant_mode(mode):
        assert tpi.clip_grad_norm_([empty], 1.0, tp_group=None, norm_type=norm_type).item() == 0.0


def test_one_parameter_and_a_generator():
    for wrap in (lambda p: p, lambda p: (q for q in [p])):
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        assert tpi.clip_grad_norm_(wrap(p), 1.0, tp_group=None).item() == 5.0
        assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_gradient_strides_do_not_count():
    grad = wide_randn(6, 8, generator=torch.Generator().manual_seed(0))
    totals = []
    for g in (grad, grad.t().contiguous().t()):
        p = torch.nn.Parameter(torch.zeros(6, 8))
        p.grad = g.clone(memory_format=torch.preserve_format)
        with tpi.set_tp_invariant_mode(True):
            totals.append(tpi.clip_grad_norm_(p, 1.0, tp_group=None))
    assert_bitwise_equal(totals[1], totals[0])


def test_an_injected_gemm_fn_is_used():
    calls = []

    def spy(a, b, *, bias=None, out_dtype=None):
        calls.append((a.dtype, b.dtype))
        return reference.matmul(a, b, bias=bias, out_dtype=out_dtype)

    p = torch.nn.Parameter(torch.zeros(2, 3).bfloat16())
    p.grad = torch.ones(2, 3).bfloat16()
    with tpi.set_tp_invariant_mode(True):
        tpi.clip_grad_norm_(p, 1.0, tp_group=None, gemm_fn=spy)
    assert calls
    assert set(calls) == {(torch.float32, torch.float32)}


# --- not finite, not supported --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", ["column.weight", "norm.weight"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite(mode, name, value, norm_type):
    gradients = full_gradients()
    gradients[name].view(-1)[-1] = value  # of a sharded one, the last rank's

    def on_rank(tp_group):
        made = parameters_of(gradients, tp_group)
        with tpi.set_tp_invariant_mode(mode):
            with pytest.raises(RuntimeError) as caught:
                tpi.clip_grad_norm_(made.values(), 1.0, tp_group=tp_group, norm_type=norm_type, error_if_nonfinite=True)
            untouched = {n: p.grad.clone() for n, p in made.items() if p.grad is not None}
            total = tpi.clip_grad_norm_(made.values(), 1.0, tp_group=tp_group, norm_type=norm_type)
        return str(caught.value), untouched, total.item()

    for rank, (text, untouched, total) in enumerate(run_ranks(on_rank, 2)):
        assert text == f"the total norm of the gradients is {value}: it cannot be clipped"
        assert repr(total) == repr(value)
        dim, stride = PARAMETERS["column.weight"][1:]
        expected = shard(gradients["column.weight"], dim=dim, rank=rank, world=2, stride=stride)
        assert_bitwise_equal(untouched["column.weight"], expected)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_an_infinite_norm_of_whole_parameters_alone(mode):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([math.inf, 1.0])
    with tpi.set_tp_invariant_mode(mode):
        assert tpi.clip_grad_norm_(p, 1.0, tp_group=None).item() == math.inf


@pytest.mark.parametrize("norm_type", [1, 3.0, 0, -math.inf, "fro"])
def test_another_norm_type(norm_type):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    text = f"norm_type={norm_type!r} is not supported: choose 2.0 or inf"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tpi.clip_grad_norm_(p, 1.0, tp_group=None, norm_type=norm_type)
    assert_bitwise_equal(p.grad, torch.ones(2))


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_as_dtensors_are_refused(one_rank):
    from torch.distributed.tensor import Replicate, distribute_tensor  # slow to import

    p = torch.nn.Parameter(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()]))
    p.grad = torch.ones_like(p)
    text = "the gradient of parameter 0 with shape (2,) on rank 0 is a DTensor: only plain tensors are supported"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        tpi.clip_grad_norm_(p, 1.0, tp_group=None)
