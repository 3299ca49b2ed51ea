"""The gradient norm and clipping: the same bits at every degree and on every rank, and torch's values."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from meshes import init_device_mesh
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh

import tp_invariant as tpi
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.core.layout import shard, unshard
from tp_invariant.layers import grad_partial_sums, parameters
from tp_invariant.layers.parameters import mark_sharded
from tp_invariant.testing import assert_bitwise_equal, wide_randn

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


# --- what is left alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_below_the_norm_keep_their_bytes(mode, dtype):
    gradients = full_gradients(dtype, scale=1e-3, spread=3)
    gradients["norm.weight"][:3] = torch.tensor([-0.0, 0.0, 6e-8])
    results = clip_on_ranks(2, gradients, 1e6, mode)
    assert_bitwise_equal(unsharded(results), gradients)


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


def test_one_parameter_and_a_generator():
    for wrap in (lambda p: p, lambda p: (q for q in [p])):
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        assert tpi.clip_grad_norm_(wrap(p), 1.0, tp_group=None).item() == 5.0
        assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


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


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_has_the_same_bits_at_every_degree(dtype, norm_type, value):
    """torch's CPU makes NaNs of any sign and payload, by shape and by place in a vector."""
    gradients = full_gradients(dtype)
    for name, sign in (("column.weight", 1), ("row.weight", -1), ("norm.weight", -1)):
        gradients[name].view(-1)[5] = sign * value
    wanted = None
    for world in DEGREES:
        results = clip_on_ranks(world, gradients, 1.0, norm_type=norm_type)
        grads = unsharded(results)
        wanted = wanted or (results[0][0], grads)
        for rank, (total, _) in enumerate(results):
            assert_bitwise_equal(total, torch.tensor(value), f"total norm on rank {rank} of {world}")
        assert_bitwise_equal(grads, wanted[1], f"TP={world}")
    assert wanted is not None and wanted[1]["column.weight"].isnan().any()


@pytest.mark.parametrize("norm_type", [1, 3.0, 0, -math.inf, "fro"])
def test_another_norm_type(norm_type):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    text = f"norm_type={norm_type!r} is not supported: choose 2.0 or inf"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tpi.clip_grad_norm_(p, 1.0, tp_group=None, norm_type=norm_type)
    assert_bitwise_equal(p.grad, torch.ones(2))


def refused(p, text, tp_group=None):
    before = p.grad.to_local().clone()
    for mode in (True, False):
        with tpi.set_tp_invariant_mode(mode), pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            tpi.clip_grad_norm_(p, 1.0, tp_group=tp_group)
    assert_bitwise_equal(p.grad.to_local(), before)


def test_a_partial_gradient(one_rank):
    from torch.distributed.tensor import DTensor, Partial

    grad = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
    p = torch.nn.Parameter(torch.empty_like(grad))
    p.grad = grad
    refused(
        p,
        "the gradient of parameter 0 with shape (2,) on rank 0 is a DTensor placed as (Partial(sum),) on the mesh [0]: "
        "a Partial is a sum that is not yet reduced, and reducing it here would add in a collective. Redistribute the "
        "gradient to Shard or Replicate first",
    )


# --- DTensors -------------------------------------------------------------------------------------------------------

# name: (shape, sharded dim or None); on 8 ranks the uneven ones leave some of them with less, or with nothing
DTENSORS = {
    "even.0": ((48, 40), 0),
    "even.1": ((20, 48), 1),
    "even.bias": ((48,), 0),
    "uneven.0": ((13, 24), 0),
    "uneven.last": ((9, 5, 11), 2),
    "few": ((3, 70), 0),
    "whole": ((7, 40), None),
    "scalar": ((), None),
}


def dtensor_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return {name: wide_randn(*shape, generator=generator, spread=2).to(dtype) for name, (shape, _) in DTENSORS.items()}


def with_gradient(grad):
    """A parameter whose gradient is a copy of grad."""
    p = torch.nn.Parameter(grad.clone())
    p.grad = grad.clone()
    return p


def plain_reference(gradients, leaf_dims, max_norm=1.0, **options):
    """(norm, clipped gradients) of whole plain parameters with these leaf dims."""
    made = {name: with_gradient(grad) for name, grad in gradients.items()}
    for name, p in made.items():
        mark_sharded(p, leaf_dims[name], 1)
    with tpi.set_tp_invariant_mode(True):
        total = tpi.clip_grad_norm_(made.values(), max_norm, tp_group=None, **options)
    return total, {name: p.grad for name, p in made.items()}


def clip_dtensors(mesh, gradients, placements, mode=True, plain=None, tp_group=None, **options):
    """(norm, full clipped gradients); `plain` parameters are clipped along, those first."""
    from torch.distributed.tensor import distribute_tensor

    parameters._in_use.clear()  # models of other tests that live on in this process, whose layers these could be of
    made = {
        name: with_gradient(distribute_tensor(grad, mesh, placements[name], src_data_rank=None))
        for name, grad in gradients.items()
    }
    with tpi.set_tp_invariant_mode(mode):
        total = tpi.clip_grad_norm_([*(plain or {}).values(), *made.values()], 1.0, tp_group=tp_group, **options)
    assert type(total) is torch.Tensor
    return total, {name: p.grad.full_tensor() for name, p in made.items()}


def one_dim_placements():
    from torch.distributed.tensor import Replicate, Shard

    return {name: [Replicate() if dim is None else Shard(dim)] for name, (_, dim) in DTENSORS.items()}


def close_to_torch(total, grads, gradients, **options):
    expected, expected_grads = torchs(gradients, 1.0, **options)
    rtol = 1e-6 if next(iter(grads.values())).dtype == torch.float32 else 2**-8
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double(), expected_grads[name], rtol=rtol, atol=1e-12, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtensors_have_the_bits_of_plain_tensors_at_every_degree(dtype, norm_type):
    gradients = dtensor_gradients(dtype)

    def on_rank(tp_group):
        mesh = DeviceMesh.from_group(tp_group, "cpu")
        return clip_dtensors(mesh, gradients, one_dim_placements(), norm_type=norm_type)

    total, grads = plain_reference(gradients, {name: dim for name, (_, dim) in DTENSORS.items()}, norm_type=norm_type)
    close_to_torch(total, grads, gradients, norm_type=norm_type)
    for world in DEGREES:
        for rank, result in enumerate(run_ranks(on_rank, world)):
            assert_bitwise_equal(result, (total, grads), f"rank {rank} of {world}")


def test_a_local_part_without_elements_may_have_any_shape():
    """`torch.empty(0)` is what DTensor.from_local is usually given there."""
    full = wide_randn(2, 3, generator=torch.Generator().manual_seed(0))

    def on_rank(tp_group):
        from torch.distributed.tensor import DTensor, Shard

        mesh, rank = DeviceMesh.from_group(tp_group, "cpu"), tp_group.rank()
        local = full[:, rank : rank + 1].clone() if rank < 3 else torch.empty(0)
        grad = DTensor.from_local(local, mesh, [Shard(1)], shape=full.shape, stride=full.stride())
        p = torch.nn.Parameter(torch.empty_like(grad))
        p.grad = grad
        with tpi.set_tp_invariant_mode(True):
            return tpi.clip_grad_norm_(p, 1e9, tp_group=tp_group)

    expected, _ = plain_reference({"p": full}, {"p": 1}, max_norm=1e9)
    for total in run_ranks(on_rank, 4):
        assert_bitwise_equal(total, expected)


def test_a_rank_whose_gradient_is_elsewhere():
    """An error on all ranks, as otherwise those without one would wait for it."""

    def on_rank(tp_group):
        p = torch.nn.Parameter(torch.zeros(2, device="meta" if tp_group.rank() else "cpu"))
        p.grad = torch.ones_like(p)
        q = with_gradient(torch.ones(3))
        with pytest.raises(
            RuntimeError, match=r"the gradient of parameter 1 is .*'cpu'.* on rank 0; .*'meta'.* on rank 1"
        ):
            tpi.clip_grad_norm_([q, p], 1.0, tp_group=tp_group)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_gradients_that_are_still_on_their_way(mode):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    p, arrived = torch.nn.Parameter(torch.zeros(2)), torch.tensor([3.0, 4.0])
    p.grad = AsyncCollectiveTensor(arrived)
    assert type(grad_partial_sums.local_part(p.grad)) is torch.Tensor, "it has an address"
    with tpi.set_tp_invariant_mode(mode):
        assert tpi.clip_grad_norm_(p, 2.5, tp_group=None).item() == 5.0
    assert arrived.tolist() == pytest.approx([1.5, 2.0], rel=1e-5)


def test_gradients_on_several_devices():
    ps = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))]
    for p in ps:
        p.grad = torch.ones_like(p)
    text = (
        "the gradient of parameter 1 with shape (2,) on rank 0 is on meta: it must be on cpu, as that of parameter 0 is"
    )
    with tpi.set_tp_invariant_mode(True), pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tpi.clip_grad_norm_(ps, 1.0, tp_group=None)


def test_dtensors_and_plain_tensors_together():
    gradients, plain_gradients = dtensor_gradients(), full_gradients(spread=3)

    def on_rank(tp_group):
        plain = parameters_of(plain_gradients, tp_group)
        mesh = DeviceMesh.from_group(tp_group, "cpu")
        total, grads = clip_dtensors(mesh, gradients, one_dim_placements(), plain=plain, tp_group=tp_group)
        return total, {**grads, **{name: p.grad for name, p in plain.items() if p.grad is not None}}

    (first,) = run_ranks(on_rank, 1)
    close_to_torch(*first, {**gradients, **plain_gradients})
    for world in (2, 4, 8):
        results = run_ranks(on_rank, world)
        for total, grads in results:
            assert_bitwise_equal(total, first[0], f"TP={world}")
            assert_bitwise_equal({n: grads[n] for n in gradients}, {n: first[1][n] for n in gradients}, f"TP={world}")
        assert_bitwise_equal(unsharded(results), {n: first[1][n] for n in plain_gradients}, f"TP={world}")


def test_dtensors_with_the_mode_off():
    """torch's norm of a DTensor: right, but other bits at other degrees, so the tests of equality can fail."""
    gradients = dtensor_gradients()

    def on_rank(tp_group):
        mesh = DeviceMesh.from_group(tp_group, "cpu")
        return clip_dtensors(mesh, gradients, one_dim_placements(), mode=False)

    totals = set()
    for world in DEGREES:
        for total, grads in run_ranks(on_rank, world):
            close_to_torch(total, grads, gradients)
            totals.add(float(total))
    assert len(totals) > 1


def test_dtensors_on_one_mesh_dim_move_leaves_once():
    """Even and uneven ones alike, with plain ones of the same group. The mode off adds on the wire."""

    def on_rank(tp_group, mode):
        from torch.distributed.tensor import distribute_tensor
        from torch.distributed.tensor.debug import CommDebugMode

        made = parameters_of(full_gradients(), tp_group)
        mesh, placements = DeviceMesh.from_group(tp_group, "cpu"), one_dim_placements()
        for name, grad in dtensor_gradients().items():
            made[name] = with_gradient(distribute_tensor(grad, mesh, placements[name], src_data_rank=None))
        with CommDebugMode() as seen, tpi.set_tp_invariant_mode(mode):
            tpi.clip_grad_norm_(made.values(), 1.0, tp_group=tp_group)
        return {str(operation): count for operation, count in seen.get_comm_counts().items()}

    for counts in run_ranks(on_rank, 4, True):
        assert list(counts.values()) == [2], counts  # before that, sixteen bytes a rank: consistency/same_gradients.py
        assert "allgather" in next(iter(counts)).replace("_", ""), counts
    for counts in run_ranks(on_rank, 4, False):
        assert any("reduce" in operation for operation in counts), counts


def test_dtensors_on_two_mesh_dims():
    """The leaf dim is that of the last Shard, for every shape of the mesh; the control takes the first Shard's."""
    shapes = {"00": (48, 40), "01": (24, 40), "10": (40, 16), "r1": (9, 40), "0r": (40, 3), "rr": (5, 7)}
    shapes |= {"uneven.00": (13, 20), "uneven.01": (5, 11), "uneven.r0": (11, 6)}

    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        return {name: wide_randn(*shape, generator=generator, spread=2) for name, shape in shapes.items()}

    gradients = made(5)

    def on_rank(tp_group):
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.debug import CommDebugMode

        kinds = {"0": Shard(0), "1": Shard(1), "r": Replicate()}
        placements = {name: [kinds[letter] for letter in name[-2:]] for name in gradients}
        results = {}
        for sizes in ((1, 8), (2, 4), (4, 2)):
            mesh = init_device_mesh("cpu", sizes)
            with CommDebugMode() as seen:
                on = clip_dtensors(mesh, gradients, placements)
            assert not [name for name in seen.get_comm_counts() if "reduce" in str(name)]
            largest = clip_dtensors(mesh, gradients, placements, norm_type=math.inf)
            stock = [clip_dtensors(mesh, given, placements, mode=False) for given in (gradients, *map(made, range(6)))]
            results[sizes] = on, largest, stock
        return results

    last = {name: 1 if name.endswith("1") else 0 for name in gradients}
    expected = plain_reference(gradients, last)
    expected_largest = plain_reference(gradients, last, norm_type=math.inf)
    close_to_torch(*expected, gradients)
    first = {name: 1 if "1" in name else 0 for name in gradients} | {"01": 0, "uneven.01": 0}
    others = [made(seed) for seed in range(16)]  # one norm in eight shows it
    assert any(not torch.equal(plain_reference(x, first)[0], plain_reference(x, last)[0]) for x in others)
    off = set()
    for rank, results in enumerate(run_ranks(on_rank, 8)):
        for sizes, (on, largest, stock) in results.items():
            assert_bitwise_equal(on, expected, f"rank {rank}, mesh {sizes}")
            assert_bitwise_equal(largest, expected_largest, f"rank {rank}, mesh {sizes}, inf")
            close_to_torch(*stock[0], gradients)
            off.add(tuple(float(total) for total, _ in stock))
    assert len(off) > 1, "one norm in a few differs: on some machines that of the first gradients does not"


class TwoLayers(torch.nn.Module):
    def __init__(self, column, row):
        super().__init__()
        self.column, self.row = torch.nn.Parameter(column), torch.nn.Parameter(row)


def test_fsdp2_with_tensor_parallelism():
    """fully_shard of DTensors over tp, and of plain parts over tp that say so by their attributes."""
    generator = torch.Generator().manual_seed(4)
    gradients = {"column": wide_randn(48, 20, generator=generator), "row": wide_randn(22, 48, generator=generator)}

    def on_rank(tp_group):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor

        totals = []
        for sizes in ((2, 4), (4, 2), (8, 1)):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            group = resolve_group(mesh["tp"])
            by_placement = [
                distribute_tensor(grad, mesh["tp"], [Shard(dim)], src_data_rank=None)
                for dim, grad in enumerate(gradients.values())
            ]
            by_attribute = [
                shard(grad, dim=dim, rank=group.rank, world=group.size) for dim, grad in enumerate(gradients.values())
            ]
            for parts in (by_placement, by_attribute):
                model = TwoLayers(*parts)
                fully_shard(model, mesh=mesh["dp"])
                for dim, p in enumerate(model.parameters()):
                    if parts is by_placement and dim == 0 and group.size > 1:
                        assert type(p.placements[0]).__name__ == "_StridedShard"  # what FSDP2 makes of Shard(0) over tp
                    p.grad = p.detach().clone()
                    if parts is by_attribute:
                        if group.size > 1:
                            with pytest.raises(ValueError, match=r"fully_shard drops the attributes"):
                                tpi.clip_grad_norm_(p, 1.0, tp_group=mesh["tp"])
                        mark_sharded(p, dim, 1)
                for mode in (True, False):
                    with tpi.set_tp_invariant_mode(mode):
                        totals.append(tpi.clip_grad_norm_(model.parameters(), 1e9, tp_group=mesh["tp"]))
                totals.append(tpi.clip_grad_norm_(model.parameters(), 1e9, tp_group=mesh["tp"], norm_type=math.inf))
        return totals

    expected, _ = plain_reference(gradients, {"column": 0, "row": 1}, max_norm=1e9)
    largest = max(float(grad.abs().max()) for grad in gradients.values())
    for totals in run_ranks(on_rank, 8):
        assert len(totals) == 18
        for on, off, inf in zip(totals[::3], totals[1::3], totals[2::3], strict=True):
            assert_bitwise_equal(on, expected)
            torch.testing.assert_close(off.double(), expected.double(), rtol=1e-6, atol=0)
            assert inf.item() == largest


def test_a_dtensor_that_says_twice_how_it_is_sharded():
    def on_rank(tp_group):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh.from_group(tp_group, "cpu")
        p = with_gradient(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None))
        mark_sharded(p, 0, 1)
        refused(
            p,
            f"the gradient of parameter 0 with shape (4, 2) on rank {tp_group.rank()} is a DTensor placed as "
            "(Shard(dim=0),) on the mesh [0, 1], which has ranks [0, 1] in common with tp_group, and the parameter has "
            "tensor_model_parallel=True: over these ranks the placements say how it is sharded, so unset the attribute",
            tp_group,
        )

    run_ranks(on_rank, 2)


def test_a_dtensor_on_other_ranks():
    def on_rank(tp_group):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh("cpu", [0, 1])
        p = with_gradient(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None))
        if tp_group.rank() > 1:
            refused(
                p,
                "the gradient of parameter 0 with shape (4, 2) on rank 0 is a DTensor placed as (Shard(dim=0),) on the "
                f"mesh [0, 1], which global rank {tp_group.rank()} is not in: leave the parameter out there",
            )

    run_ranks(on_rank, 8)


# --- later calls ------------------------------------------------------------------------------------------------------


def test_a_gradient_that_differs_in_a_later_call_is_noticed():
    def on_rank(tp_group):
        gradients = full_gradients()
        made = parameters_of(gradients, tp_group)
        with tpi.set_tp_invariant_mode(True):
            for _ in range(3):
                tpi.clip_grad_norm_(made.values(), 1.0, tp_group=tp_group)
            if dist.get_rank(tp_group) == 1:
                made["norm.weight"].grad[3] += 1
            with pytest.raises(RuntimeError, match="with shape \\(40,\\) differs"):
                tpi.clip_grad_norm_(made.values(), 1.0, tp_group=tp_group)
            made["norm.weight"].grad = gradients["norm.weight"].clone()
            if dist.get_rank(tp_group) == 1:
                made["norm.weight"].grad = None
            with pytest.raises(RuntimeError, match="disagree"):
                tpi.clip_grad_norm_(made.values(), 1.0, tp_group=tp_group)

    run_ranks(on_rank, 2)


def flushed_late(tp_group):
    """One rank flushes subnormal numbers after the group has compared its environment."""
    with tpi.set_tp_invariant_mode(True):
        layer = tpi.Linear(32, 32, parallel_mode="column", tp_group=tp_group)
        layer(torch.ones(4, 32)).sum().backward()
        tpi.clip_grad_norm_(layer.parameters(), 1.0)
        torch.set_flush_denormal(tp_group.rank() == 1)
        try:
            with pytest.raises(RuntimeError, match="whether the CPU flushes subnormal numbers"):
                tpi.clip_grad_norm_(layer.parameters(), 1.0)
        finally:
            torch.set_flush_denormal(False)
        tpi.clip_grad_norm_(layer.parameters(), 1.0)


def test_a_rank_that_flushes_subnormal_numbers_later_is_noticed():
    run_ranks(flushed_late, 2)
