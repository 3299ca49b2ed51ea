"""DDP's and FSDP2's gradient sums in a fixed order: no bucket size, order or wrapping changes a bit, and the scale."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gpus import on_gpus
from meshes import init_device_mesh
from models import tree_sum
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.data_parallel import FixedOrderReduceScatter, TokenCount, fix_reduction_order, fixed_order_hook
from tp_invariant.testing import RankError, assert_bitwise_equal, wide_randn

SHAPES = {"a": (9, 13), "b": (61,), "c": (16, 10), "d": (3,), "e": (2, 40)}
LARGE = {"a": (512, 640), "b": (4099,), "c": (64, 33), "d": (3,), "e": (1024, 1024), "f": (300, 77)}
SHAPES_ON = {"cpu": SHAPES, "cuda": LARGE}
WORLDS = (2, 3, 4, 8)


class Leaf(torch.nn.Module):
    """Its parameter's gradient is what forward is given."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * gradient.to(self.weight)).sum()


class Leaves(torch.nn.Module):
    def __init__(self, names, dtype=torch.float32, shapes=SHAPES):
        super().__init__()
        for name in names:
            self.add_module(name, Leaf(shapes[name], dtype))

    def forward(self, gradients):
        return sum(leaf(gradients[name]) for name, leaf in self.named_children())


def gradients_of(rank, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(rank)
    return {name: wide_randn(*shape, generator=generator, spread=4).to(dtype) for name, shape in shapes.items()}


def expected_sum(world, dtype=torch.float32, divide_by=1, shapes=SHAPES):
    """The ranks' gradients added by a binary tree in fp32, divided, and rounded once."""
    per_rank = [gradients_of(rank, dtype, shapes) for rank in range(world)]
    return {name: (tree_sum([g[name].float() for g in per_rank]) / divide_by).to(dtype) for name in shapes}


# --- DistributedDataParallel ----------------------------------------------------------------------------------------

# bucket_cap_mb, reversed registration, gradient_as_bucket_view; the smallest has one parameter a bucket
BUCKETS = {
    "cpu": ((25, False, False), (2e-6, False, True), (0.0008, False, False), (0.0008, True, True), (25, True, False)),
    "cuda": (
        (25, False, False), (0.01, False, True), (0.1, False, False), (1, False, False),
        (1, True, True), (0.1, True, False), (0.01, True, False), (25, True, True),
    ),
}  # fmt: skip


def ddp_gradients(tp_group, dtype, with_hook, device):
    """For each of BUCKETS the gradients of a second step, when DDP has rebuilt its buckets; and how many there were."""
    shapes = SHAPES_ON[device]
    gradients = gradients_of(dist.get_rank(tp_group), dtype, shapes)
    results, buckets = [], []
    for cap, backwards, view in BUCKETS[device]:
        model = Leaves(sorted(shapes, reverse=backwards), dtype, shapes).to(device)
        ddp = DistributedDataParallel(model, process_group=tp_group, bucket_cap_mb=cap, gradient_as_bucket_view=view)
        seen = []

        def hook(state, bucket, seen=seen):
            seen.append(bucket.index())
            return fixed_order_hook(state, bucket)

        if with_hook:
            ddp.register_comm_hook(tp_group, hook)
        for _ in range(2):
            seen.clear()
            ddp.zero_grad()
            ddp(gradients).backward()
        results.append({name: leaf.weight.grad.to("cpu", copy=True) for name, leaf in model.named_children()})
        buckets.append(len(seen))
    return results, buckets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("device", "world"), [*(("cpu", n) for n in WORLDS), *on_gpus(2, 4, 8, before=("cuda",))])
def test_ddp_sums_in_one_order(device, world, dtype):
    shapes = SHAPES_ON[device]
    expected = expected_sum(world, dtype, shapes=shapes)
    for rank, (results, buckets) in enumerate(run_ranks(ddp_gradients, world, dtype, True, device, device=device)):
        if device == "cpu":
            assert buckets[:2] == [1, len(shapes)]
            assert 1 < buckets[2] < len(shapes) or dtype == torch.bfloat16
        else:
            assert buckets[0] < buckets[3] < buckets[1]
        for case, grads in zip(BUCKETS[device], results, strict=True):
            assert_bitwise_equal(grads, expected, f"rank {rank} of {world}, {case}")
    for name, grad in expected.items():
        parts = torch.stack([gradients_of(rank, dtype, shapes)[name].double() for rank in range(world)])
        exact, one_rounding = parts.sum(0), torch.finfo(dtype).eps / 2
        bound = one_rounding * exact.abs() + world * torch.finfo(torch.float32).eps * parts.abs().sum(0)
        assert bool(((grad.double() - exact).abs() <= bound).all())


def test_adding_in_bfloat16_gives_something_else():
    """The control of one rounding."""
    rounded_each_time = tree_sum([gradients_of(rank, torch.bfloat16)["a"] for rank in range(8)])
    assert not torch.equal(rounded_each_time, expected_sum(8, torch.bfloat16)["a"])


@pytest.mark.parametrize(("device", "world"), [("cpu", 4), ("cpu", 8), *on_gpus(4, 8, before=("cuda",))])
def test_the_bits_of_ddps_own_all_reduce_depend_on_buckets(device, world):
    """The control: the ring adds elements in another order where they lie elsewhere in a bucket."""
    results, _ = run_ranks(ddp_gradients, world, torch.float32, False, device, device=device)[0]
    assert len({testing.digest(grads) for grads in results}) > 1
    mean = expected_sum(world, divide_by=world, shapes=SHAPES_ON[device])
    assert all(not torch.equal(grads["a"], mean["a"]) for grads in results), "nor is it the tree's order"


def classifier(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5))


def labelled(micro_batch):
    """Inputs and labels; how many are valid differs a lot between micro-batches."""
    generator = torch.Generator().manual_seed(micro_batch)
    x, labels = torch.randn(16, 12, generator=generator), torch.randint(5, (16,), generator=generator)
    labels[: 2 * micro_batch] = -100
    return x, labels


def norm_of(model):
    return tpi.clip_grad_norm_(model.parameters(), float("inf"), tp_group=None)


def ddp_norms(tp_group, world, micro_batches):
    """Norms of one step's gradients, accumulated under no_sync, and how often the hook of one of them was called."""
    share, norms, calls = micro_batches // world, {}, []
    mine = range(dist.get_rank(tp_group) * share, (dist.get_rank(tp_group) + 1) * share)

    def hook(state, bucket):
        calls.append(bucket.index())
        return fixed_order_hook(state, bucket)

    for name in ("sum", "tokens", "stock"):
        model = classifier()
        ddp = DistributedDataParallel(model, process_group=tp_group)
        total = sum(int((labelled(i)[1] != -100).sum()) for i in range(micro_batches))
        if name == "sum":
            ddp.register_comm_hook(tp_group, hook)
        elif name == "tokens":
            tokens = TokenCount(tp_group)
            ddp.register_comm_hook(tokens, fixed_order_hook)
            assert tokens.set(sum(int((labelled(i)[1] != -100).sum()) for i in mine)) == total == tokens.total
        for i in mine:
            x, labels = labelled(i)
            with ddp.no_sync() if i != mine[-1] else torch.enable_grad():
                loss = cross_entropy(ddp(x), labels, reduction="sum")
                (loss if name == "tokens" else loss / total).backward()
        norms[name] = norm_of(model)
    return norms, len(calls)


@pytest.mark.parametrize("world", [2, 4])
def test_the_scale_of_an_accumulated_step(world):
    """The loss is a mean over the valid tokens of all micro-batches: divided once, against one process with all."""
    model = classifier()
    x, labels = (torch.cat(parts) for parts in zip(*map(labelled, range(8)), strict=True))
    cross_entropy(model(x), labels).backward()
    oracle = norm_of(model)
    for norms, calls in run_ranks(ddp_norms, world, world, 8):
        assert calls == 1, "one reduction a step"
        torch.testing.assert_close(norms["sum"], oracle, rtol=1e-5, atol=0)
        torch.testing.assert_close(norms["tokens"], oracle, rtol=1e-5, atol=0)
        # what the hook's scale differs from: stock DDP divides by the ranks once more
        torch.testing.assert_close(norms["stock"] * world, oracle, rtol=1e-5, atol=0)


def ddp_of_tp_layers(world_group, degrees):
    """Whole gradients of tensor-parallel layers in DDP over two ranks, for each TP degree; spare ranks do the same."""
    return [
        _ddp_of_tp_layers(init_device_mesh("cpu", (4 // tp, 2, tp), mesh_dim_names=("copy", "dp", "tp")))
        for tp in degrees
    ]


def _ddp_of_tp_layers(mesh):
    tp_group, dp_group = mesh["tp"].get_group(), mesh["dp"].get_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        tpi.LayerNormLinear(32, 64, parallel_mode="column", tp_group=tp_group),
        torch.nn.ReLU(),
        tpi.Linear(64, 32, parallel_mode="row", tp_group=tp_group),
    )
    ddp = DistributedDataParallel(model, process_group=dp_group, bucket_cap_mb=0.004)
    ddp.register_comm_hook(dp_group, fixed_order_hook)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    x, dy = (wide_randn(16, 32, generator=generator, spread=3) for _ in range(2))
    ddp(x).backward(dy)
    return testing.full_grads(model)


def test_ddp_of_tensor_parallel_layers():
    degrees = (1, 2, 4)
    with tpi.set_tp_invariant_mode(True):
        ranks = run_ranks(ddp_of_tp_layers, 8, degrees)
    expected = ranks[0][0]
    for rank, results in enumerate(ranks):
        for tp, grads in zip(degrees, results, strict=True):
            assert_bitwise_equal(grads, expected, f"rank {rank}, TP={tp} x DP=2")
    with tpi.set_tp_invariant_mode(False):
        stock = run_ranks(ddp_of_tp_layers, 8, degrees)[0]
    assert len({testing.digest(grads) for grads in stock}) > 1


# --- FSDP2 ----------------------------------------------------------------------------------------------------------

WRAPPINGS = ("root", "each", "some")


def fsdp_gradients(tp_group, dtype, reduction, device="cpu", steps=1):
    """For each of WRAPPINGS the whole gradients, accumulated over `steps` backwards of which the last one reduces."""
    rank, world, shapes = dist.get_rank(tp_group), dist.get_world_size(tp_group), SHAPES_ON[device]
    mesh = DeviceMesh.from_group(tp_group, device)
    results = []
    for wrapping in WRAPPINGS:
        model = Leaves(sorted(shapes, reverse=wrapping == "some"), dtype, shapes).to(device)
        for name, leaf in model.named_children():
            if wrapping == "each" or (wrapping == "some" and name in "bd"):
                fully_shard(leaf, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if reduction == "sum":
            fix_reduction_order(model)
        elif reduction == "tokens":
            tokens = TokenCount(tp_group)
            fix_reduction_order(model, tokens)
            tokens.set(7 * rank if device == "cpu" else 8)
        elif reduction == "mean":
            for module in model.modules():
                if hasattr(module, "set_custom_reduce_scatter"):
                    module.set_custom_reduce_scatter(FixedOrderReduceScatter())
        else:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        for step in range(steps):
            model.set_requires_gradient_sync(step == steps - 1)
            model(gradients_of(rank + world * step, dtype, shapes)).backward()
        results.append({name: leaf.weight.grad.full_tensor().cpu() for name, leaf in model.named_children()})
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "tokens", "mean"])
def test_fsdp_sums_in_one_order(reduction, dtype):
    """The same bits however the model is wrapped; and the same as DDP's hook, so both add by the same tree."""
    for world in WORLDS if dtype == torch.float32 else (3, 8):
        divide_by = {"sum": 1, "tokens": 7 * world * (world - 1) // 2, "mean": world}[reduction]
        expected = expected_sum(world, dtype, divide_by)
        for rank, results in enumerate(run_ranks(fsdp_gradients, world, dtype, reduction)):
            for wrapping, grads in zip(WRAPPINGS, results, strict=True):
                assert_bitwise_equal(grads, expected, f"rank {rank} of {world}, {wrapping}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# over gloo, with ranks that share a GPU, processes end by SIGSEGV in fully_shard
@pytest.mark.parametrize(("device", "world"), on_gpus(2, 4, 8, before=("cuda",), shared=False))
def test_fsdp_sums_in_one_order_on_gpus(device, world, dtype):
    """Divided by powers of two alone: by others torch multiplies with the reciprocal on CUDA, not so on a CPU."""
    for reduction, divide_by in (("sum", 1), ("tokens", 8 * world), ("mean", world)):
        expected = expected_sum(world, dtype, divide_by, LARGE)
        for rank, results in enumerate(run_ranks(fsdp_gradients, world, dtype, reduction, device, device=device)):
            for wrapping, grads in zip(WRAPPINGS, results, strict=True):
                assert_bitwise_equal(grads, expected, f"rank {rank} of {world}, {reduction}, {wrapping}")


@pytest.mark.parametrize(("device", "world"), [("cpu", 4), ("cpu", 8), *on_gpus(4, 8, before=("cuda",), shared=False)])
def test_the_bits_of_fsdps_own_sum_depend_on_the_wrapping(device, world):
    """The control; on CUDA against the tree's order, as the rank that keeps an element, and so NCCL's ring for it, is
    the same in every wrapping.
    """
    results = run_ranks(fsdp_gradients, world, torch.float32, "stock", device, device=device)[0]
    digests = {testing.digest(grads) for grads in results}
    if device == "cuda":
        digests.add(testing.digest(expected_sum(world, shapes=LARGE)))
    assert len(digests) > 1


def test_fsdp_accumulates_and_reduces_once():
    per_step = [[gradients_of(rank + 2 * step) for rank in range(2)] for step in range(2)]
    first, second = per_step
    expected = {name: tree_sum([first[rank][name] + second[rank][name] for rank in range(2)]) for name in SHAPES}
    for results in run_ranks(fsdp_gradients, 2, torch.float32, "sum", "cpu", 2):
        for grads in results:
            assert_bitwise_equal(grads, expected)


def fsdp_in_two_dtypes(tp_group):
    """bfloat16 computation, reduced in fp32."""
    model = Leaves(SHAPES)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=DeviceMesh.from_group(tp_group, "cpu"), mp_policy=policy)
    fix_reduction_order(model)
    model(gradients_of(dist.get_rank(tp_group))).backward()
    return {name: leaf.weight.grad.full_tensor() for name, leaf in model.named_children()}


def test_fsdp_with_mixed_precision():
    per_rank = [gradients_of(rank, torch.bfloat16) for rank in range(4)]
    expected = {name: tree_sum([g[name].float() for g in per_rank]) for name in SHAPES}
    for grads in run_ranks(fsdp_in_two_dtypes, 4):
        assert_bitwise_equal(grads, expected)


# --- what is refused ------------------------------------------------------------------------------------------------


def raises(kind, text):
    return pytest.raises(kind, match=f"^{re.escape(text)}")


def test_states_that_are_refused(one_rank):
    with raises(TypeError, "state=None: pass the ProcessGroup or 1-D DeviceMesh whose ranks' gradients are to be"):
        fixed_order_hook(None, None)
    with raises(TypeError, "state='dp' is a str: pass a ProcessGroup, a 1-D DeviceMesh or None"):
        fixed_order_hook("dp", None)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with raises(ValueError, "state is a 2-dimensional DeviceMesh with dims ('dp', 'tp'): pass one dim of it, "):
        fixed_order_hook(mesh, None)
    with raises(
        RuntimeError, "rank 0 of dp_group is about to divide gradients by a TokenCount that is not set: call set("
    ):
        fixed_order_hook(TokenCount(one_rank), None)


def set_counts(tp_group, counts):
    TokenCount(tp_group).set(counts[dist.get_rank(tp_group)])


@pytest.mark.parametrize("counts", [(0, 0), (3, -1)])
def test_counts_that_are_refused(counts):
    text = (
        f"the counts of the 2 ranks of dp_group are {list(counts)}: they must not be negative, and their sum, by which "
        "gradients are divided, must not be 0; skip a step without tokens on every rank"
    )
    with pytest.raises(RankError) as caught:
        run_ranks(set_counts, 2, counts)
    assert [str(error) for error in caught.value.errors.values()] == [text] * 2


@pytest.mark.parametrize("count", [1.0, True, torch.tensor(3)])
def test_a_count_that_is_no_int(one_rank, count):
    with raises(TypeError, f"local_count is {count!r} on rank 0 of dp_group: pass an int of at most 63 bits"):
        TokenCount(one_rank).set(count)


def bucket_of(x, index=0):
    return SimpleNamespace(buffer=lambda: x, index=lambda: index, parameters=list)


def calls_that_differ(tp_group):
    """What each kind of difference between two ranks raises, with the same group; then the group still works."""
    rank, x = dist.get_rank(tp_group), torch.ones(6)
    tokens, unset = TokenCount(tp_group), TokenCount(tp_group)
    tokens.set(5)
    scatter, out, ops = FixedOrderReduceScatter, torch.empty(3), dist.ReduceOp
    calls = {
        "state": lambda: fixed_order_hook((tokens, tp_group)[rank], bucket_of(x)),
        "unset": lambda: fixed_order_hook((tokens, unset)[rank], bucket_of(x)),
        "size": lambda: fixed_order_hook(tp_group, bucket_of(torch.ones(6 + rank))),
        "dtype": lambda: fixed_order_hook(tp_group, bucket_of(x.to((torch.float32, torch.bfloat16)[rank]))),
        "index": lambda: fixed_order_hook(tp_group, bucket_of(x, rank)),
        "op": lambda: scatter()(out, x, tp_group, (ops.SUM, ops.AVG)[rank]),
        "tokens": lambda: scatter((tokens, None)[rank])(out, x, tp_group, ops.SUM),
    }
    errors = {}
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        errors[name] = str(caught.value)
    return errors, fixed_order_hook(tokens, bucket_of(x * (rank + 1))).wait()


def test_ranks_that_call_differently():
    (errors, total), (others, other_total) = run_ranks(calls_that_differ, 2)
    assert errors == others, "the same on both ranks"
    divided = "what the gradients' sum is divided by is 'a TokenCount' on rank 0; "
    expected = {
        "state": divided + "'nothing' on rank 1",
        "unset": divided + "'a TokenCount that is not set' on rank 1",
        "size": "its number of elements is 6 on rank 0; 7 on rank 1",
        "dtype": "its dtype is 'torch.float32' on rank 0; 'torch.bfloat16' on rank 1",
        "index": "the index of the bucket is 0 on rank 0; 1 on rank 1",
        "op": "what the gradients' sum is divided by is 'nothing' on rank 0; 'the ranks' on rank 1",
        "tokens": divided + "'nothing' on rank 1",
    }
    for name, text in expected.items():
        assert errors[name] == (
            f"the 2 ranks of dp_group disagree: {text}. They must make the same calls with the same settings"
        )
    assert_bitwise_equal([total, other_total], [torch.full((6,), 3 / 10)] * 2)


@pytest.mark.parametrize(
    "op, text",
    [
        (dist.ReduceOp.MAX, "op=MAX is not supported, only SUM and AVG: FSDP asks for it after set_gradient_divide"),
        (dist._make_nccl_premul_sum(0.5), "op=PREMUL_SUM is not supported, only SUM and AVG: FSDP asks for it after"),
    ],
    ids=["max", "premul"],
)
def test_other_reductions_are_refused(one_rank, op, text):
    x = torch.ones(4)
    with raises(ValueError, text):
        FixedOrderReduceScatter()(torch.empty(4), x, one_rank, op)


def counted_elsewhere(tp_group, dim):
    """FSDP sums over pairs of neighbours; the tokens are counted over pairs, too."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    tokens = TokenCount(mesh[dim])
    tokens.set(1)
    reduce_scatter, out = FixedOrderReduceScatter(tokens), torch.empty(2)
    reduce_scatter(out, torch.ones(4), mesh["c"].get_group(), dist.ReduceOp.SUM)
    return out.tolist()


def test_tokens_of_other_ranks_are_refused():
    assert run_ranks(counted_elsewhere, 8, "c") == [[1.0, 1.0]] * 8
    text = r"the TokenCount counts over ranks \[0, 2\], but FSDP sums over ranks \[0, 1\]: build it with the group of"
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(counted_elsewhere, 8, "b")
    assert len(caught.value.errors) == 8


def test_dividing_twice_is_refused(one_rank):
    tokens, x = TokenCount(one_rank), torch.ones(4)
    tokens.set(2)
    with raises(
        ValueError, "op=AVG would divide gradients by the 1 ranks besides the TokenCount: call fix_reduction_order"
    ):
        FixedOrderReduceScatter(tokens)(torch.empty(4), x, one_rank, dist.ReduceOp.AVG)
    with raises(NotImplementedError, "FixedOrderReduceScatter has no async_op=True"):
        FixedOrderReduceScatter()(torch.empty(4), x, one_rank, dist.ReduceOp.SUM, async_op=True)


def test_models_that_are_refused(one_rank):
    with raises(ValueError, "no module of Leaves is an FSDPModule: call fully_shard on it first"):
        fix_reduction_order(Leaves(SHAPES))
    hsdp = Leaves("a")
    fully_shard(hsdp, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
    with raises(
        ValueError, "parameter a.weight is placed as (Replicate(), Shard(dim=0)) on a mesh of shape (1, 1): HSDP"
    ):
        fix_reduction_order(hsdp)
    alone = Leaves("a")
    fully_shard(alone, mesh=init_device_mesh("cpu", (1,)))
    with raises(
        ValueError, "parameter a.weight is on a mesh of one rank, where FSDP reduces nothing and so divides by no"
    ):
        fix_reduction_order(alone, TokenCount(one_rank))
    fix_reduction_order(alone)
    alone(gradients_of(0)).backward()
    assert_bitwise_equal(alone.a.weight.grad.full_tensor(), gradients_of(0)["a"])
