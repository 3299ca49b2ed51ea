"""Gradients summed over micro-batches and ranks: one tree, the same bits at every DP and TP degree, the right sum."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from error_texts import refused
from meshes import init_device_mesh
from models import tree_sum
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.data_parallel import MicroBatchTree, TokenCount, fix_reduction_order, micro_batch_tree
from tp_invariant.data_parallel.binary_tree import BinaryTree
from tp_invariant.testing import RankError, assert_bitwise_equal, wide_randn

SHAPES = {"a": (7, 13), "b": (31,), "c": (5, 2, 3), "scalar": (), "empty": (0, 3)}
GPUS = torch.cuda.device_count()
DEGREES_ON_GPUS = [degree for degree in (1, 2, 4, 8) if degree <= GPUS]
on_gpus = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")]


def gradient(micro_batch, name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * micro_batch + list(SHAPES).index(name))
    return wide_randn(*SHAPES[name], generator=generator, spread=4).to(dtype)


def make_parameters(dtypes=None, device="cpu"):
    return {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=(dtypes or {}).get(name), device=device))
        for name, shape in SHAPES.items()
    }


def summed(tp_group, micro_batches, dtypes=None, chunk=None, main_grad=False, count=None, device="cpu"):
    """What the tree makes of one `gradient` for each micro-batch, in the second of two steps: it starts each anew."""
    parameters = make_parameters(dtypes, device)
    tree = MicroBatchTree(parameters.values(), tp_group, micro_batches=micro_batches)
    for _ in range(2):
        for micro_batch in tree.share:
            for name, p in parameters.items():
                p.grad = gradient(micro_batch, name, p.dtype).to(device)
            tree.add(count=count(micro_batch) if count else None)
            assert all(p.grad is None for p in parameters.values())
        with mock.patch.object(micro_batch_tree, "_CHUNK", chunk or micro_batch_tree._CHUNK):
            tree.reduce(main_grad=main_grad)
        assert not main_grad or all(p.grad is None for p in parameters.values())
    return {name: (p.main_grad if main_grad else p.grad).cpu() for name, p in parameters.items()}


# --- the tree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [*range(1, 21), 64, 100])
def test_shares_meet_in_the_same_tree(leaves):
    """The expression that is computed, as text, for every way to cut the leaves into shares of consecutive ones."""

    def add(left, right):
        return f"({left}+{right})"

    def text(first, last):
        if last - first == 1:
            return str(first)
        middle = first + (1 << (last - first - 1).bit_length() - 1)
        return add(text(first, middle), text(middle, last))

    for cut in range(leaves + 1):
        whole = BinaryTree(leaves, add)
        for share in (range(cut), range(cut, leaves)):
            part = BinaryTree(leaves, add)
            for leaf in share:
                part.push(0, leaf, str(leaf))
            for node in part.nodes:
                whole.push(*node)
        assert whole.root() == text(0, leaves)


@pytest.mark.parametrize("micro_batches", [1, 3, 6, 8, 12])
def test_same_bits_at_every_degree(micro_batches):
    expected = {name: tree_sum([gradient(i, name) for i in range(micro_batches)]) for name in SHAPES}
    for world in (1, 2, 3, 4, 5, 8):
        for rank, grads in enumerate(run_ranks(summed, world, micro_batches)):
            assert_bitwise_equal(grads, expected, f"{micro_batches} micro-batches, rank {rank} of DP={world}")
    for name, grad in expected.items():
        parts = torch.stack([gradient(i, name).double() for i in range(micro_batches)])
        bound = torch.finfo(torch.float32).eps * micro_batches * parts.abs().sum(0)
        assert bool(((grad.double() - parts.sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpus)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_at_every_degree_on_gpus(dtype, device):
    """The CPU's bits, too: fp32 additions in one order."""
    dtypes = dict.fromkeys(SHAPES, dtype)
    for micro_batches in (4, 6, 8):
        exact = {
            name: tree_sum([gradient(i, name, dtype).float() for i in range(micro_batches)]).to(dtype)
            for name in SHAPES
        }
        for world in DEGREES_ON_GPUS:
            arguments = (micro_batches, dtypes, None, False, None, device)
            for rank, grads in enumerate(run_ranks(summed, world, *arguments, device=device)):
                assert_bitwise_equal(grads, exact, f"{micro_batches} micro-batches, rank {rank} of DP={world}")
    naive = [run_ranks(summed_naively, world, 8, device, device=device)[0] for world in DEGREES_ON_GPUS]
    assert len({testing.digest(total) for total in naive}) == len(DEGREES_ON_GPUS), "the control: NCCL's sum of shares"


def summed_naively(tp_group, micro_batches, device="cpu"):
    """.grad accumulated by a rank over its share, then all-reduced."""
    shares = torch.arange(micro_batches).tensor_split(dist.get_world_size(tp_group))
    total = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    for i in shares[dist.get_rank(tp_group)].tolist():
        for name, grad in total.items():
            grad += gradient(i, name).to(device)
    for grad in total.values():
        dist.all_reduce(grad, group=tp_group)
    return {name: grad.cpu() for name, grad in total.items()}


def test_summed_naively_the_bits_depend_on_the_degree():
    """The control: on this data the order of the sum shows."""
    assert len({testing.digest(run_ranks(summed_naively, world, 8)[0]) for world in (1, 2, 4, 8)}) == 4


@pytest.mark.parametrize("chunk", [1, 37])
@pytest.mark.parametrize("micro_batches", [6, 8])
def test_chunks_do_not_count(chunk, micro_batches):
    shapes = ("b", "scalar") if chunk == 1 else tuple(SHAPES)
    expected = {name: tree_sum([gradient(i, name) for i in range(micro_batches)]) for name in shapes}
    for grads in run_ranks(summed, 4, micro_batches, None, chunk):
        assert_bitwise_equal({name: grads[name] for name in shapes}, expected)


@pytest.mark.parametrize("uniform", [True, False], ids=["all-bf16", "mixed"])
def test_low_precision_is_rounded_once(uniform):
    """fp32 inside, one rounding to the parameter's dtype; with main_grad none."""
    dtypes = dict.fromkeys(SHAPES, torch.bfloat16) if uniform else {"a": torch.bfloat16, "c": torch.float16}
    exact = {
        name: tree_sum([gradient(i, name, dtypes.get(name, torch.float32)).float() for i in range(8)])
        for name in SHAPES
    }
    expected = {name: grad.to(dtypes.get(name)) for name, grad in exact.items()}
    each_time = tree_sum([gradient(i, "a", torch.bfloat16) for i in range(8)])
    assert not torch.equal(each_time, expected["a"]), "the control: adding in bfloat16 gives something else"
    for world in (1, 2, 8):
        for grads in run_ranks(summed, world, 8, dtypes):
            assert_bitwise_equal(grads, expected, f"DP={world}")
        for grads in run_ranks(summed, world, 8, dtypes, None, True):
            assert_bitwise_equal(grads, exact, f"main_grad, DP={world}")


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_counts_divide_the_sum_once(as_tensor):
    def count(micro_batch):
        return torch.tensor(3 * micro_batch) if as_tensor else 3 * micro_batch  # the first has none

    expected = {name: tree_sum([gradient(i, name) for i in range(8)]) / (3 * 28) for name in SHAPES}
    for world in (1, 4, 8):
        for grads in run_ranks(summed, world, 8, None, None, False, count):
            assert_bitwise_equal(grads, expected, f"DP={world}")


def some_without(tp_group):
    """`a` has a gradient, of -0.0, in micro-batch 5 alone; `b` in none; `c` in all."""
    parameters = make_parameters()
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    tree = MicroBatchTree([*parameters.values(), frozen, parameters["c"]], tp_group, micro_batches=8)
    for i in tree.share:
        parameters["c"].grad = gradient(i, "c").permute(2, 0, 1).contiguous().permute(1, 2, 0)  # strides do not count
        if i == 5:
            parameters["a"].grad = torch.full(SHAPES["a"], -0.0)
        tree.add()
    tree.reduce()
    assert frozen.grad is None
    return {name: p.grad for name, p in parameters.items()}


def test_parameters_without_gradients():
    nothing = dict.fromkeys(SHAPES)
    expected = nothing | {"a": torch.full(SHAPES["a"], -0.0), "c": tree_sum([gradient(i, "c") for i in range(8)])}
    for world in (1, 4):
        for grads in run_ranks(some_without, world):
            assert_bitwise_equal(grads, expected)


# --- with tensor parallelism ----------------------------------------------------------------------------------------

TOKENS, HIDDEN = 16, 32
LAYOUTS = {8: ((1, 8), (2, 4), (4, 2), (8, 1)), 4: ((1, 4), (2, 2), (4, 1)), 2: ((1, 2), (2, 1))}  # TP, DP


def train(tp_group, dp_group, sequence_parallel, device, micro_batches=8, steps=2, fsdp=False):
    """Every step's whole gradients and norm, and the parameters after the last; a step's loss is a mean over tokens."""
    torch.manual_seed(0)
    tp = dict(tp_group=tp_group, sequence_parallel=sequence_parallel, device=device)
    model = torch.nn.Sequential(
        tpi.LayerNormLinear(HIDDEN, 64, parallel_mode="column", **tp),
        torch.nn.ReLU(),
        tpi.Linear(64, HIDDEN, parallel_mode="row", **tp),
    )
    if fsdp:
        fully_shard(model[0], mesh=dp_group, shard_placement_fn=tpi.fsdp_placement)
        fully_shard(model, mesh=dp_group, shard_placement_fn=tpi.fsdp_placement)
        fix_reduction_order(model)
    # one tensor at a time: on CUDA the other forms need not round alike for shards of another size
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=micro_batches)
    seen = {}
    for step in range(steps):
        for i in tree.share:
            generator = torch.Generator().manual_seed(100 * step + i)
            x, dy = (wide_randn(TOKENS, HIDDEN, generator=generator, spread=3) for _ in range(2))
            valid = torch.rand(TOKENS, generator=generator) < 0.8
            dy[~valid] = 0.0
            if sequence_parallel:
                group = model[0].group
                x, dy = (t.chunk(group.size)[group.rank] for t in (x, dy))
            model(x.to(device)).backward(dy.to(device))
            tree.add(count=int(valid.sum()))
        tree.reduce()
        seen[f"grads{step}"] = testing.full_grads(model)
        seen[f"norm{step}"] = tpi.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return on_cpu(seen | {"parameters": testing.full_parameters(model)})


def on_cpu(results):
    return {name: on_cpu(value) if isinstance(value, dict) else value.cpu() for name, value in results.items()}


def train_layouts(world_group, variants, layouts, device):
    """`train` for each (mode, sequence_parallel, kind), at every TP x DP; consecutive ranks make a TP group.

    kind: plain shards, DTensors over the TP ranks ("mesh"), or those cut by fully_shard over the others too ("fsdp").
    """
    results = {}
    for tp, dp in layouts:
        mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
        for mode, sequence_parallel, kind in variants:
            tp_group = mesh["tp"].get_group() if kind == "group" else mesh["tp"]
            with tpi.set_tp_invariant_mode(mode):
                result = train(tp_group, mesh["dp"], sequence_parallel, device, fsdp=kind == "fsdp")
            results[mode, sequence_parallel, kind, tp, dp] = result
    return results


def train_alone(world_group, device):
    with tpi.set_tp_invariant_mode(True):
        return train(world_group, world_group, False, device)


PLAIN = [(True, False, "group"), (True, True, "group"), (False, False, "group")]
DTENSORS = [(True, True, "mesh"), (True, False, "fsdp"), (True, True, "fsdp"), (False, False, "fsdp")]


ON_GPUS = max(DEGREES_ON_GPUS, default=0)


@pytest.mark.parametrize(
    ("device", "world", "variants", "layouts"),
    [
        ("cpu", 8, PLAIN, LAYOUTS[8]),
        ("cpu", 8, DTENSORS, ((2, 4), (4, 2))),
        pytest.param("cuda", ON_GPUS, PLAIN, LAYOUTS.get(ON_GPUS), marks=on_gpus),
        pytest.param("cuda", ON_GPUS, DTENSORS, LAYOUTS.get(ON_GPUS), marks=on_gpus),
    ],
    ids=["plain", "dtensors", "plain on gpus", "dtensors on gpus"],
)
def test_tp_times_dp(device, world, variants, layouts):
    """Every TP x DP against one rank: gradients, norms, and parameters after two steps of AdamW."""
    (expected,) = run_ranks(train_alone, 1, device, device=device)
    ranks = run_ranks(train_layouts, world, variants, layouts, device, device=device)
    for rank, results in enumerate(ranks):
        for (mode, sequence_parallel, kind, tp, dp), result in results.items():
            if mode:
                what = f"rank {rank}, TP={tp} x DP={dp}, sequence_parallel={sequence_parallel}, {kind}"
                assert_bitwise_equal(result, expected, what)
    stock = [result for (mode, *_), result in ranks[0].items() if not mode]
    assert len({testing.digest(result) for result in stock}) > 1, "the control: with the mode off TP shows"


def half_precision(world_group):
    """fully_shard with bfloat16 inside, over 1, 4 and 8 ranks: parameters after two steps."""
    results = []
    for dp in (1, 4, 8):
        mesh = init_device_mesh("cpu", (dp, 8 // dp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(
            tpi.Linear(HIDDEN, 64, parallel_mode="column", tp_group=mesh["tp"]),
            tpi.Linear(64, HIDDEN, parallel_mode="row", tp_group=mesh["tp"]),
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy, shard_placement_fn=tpi.fsdp_placement)
        fix_reduction_order(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tree = MicroBatchTree(model.parameters(), mesh["dp"], micro_batches=8)
        for step in range(2):
            for i in tree.share:
                torch.manual_seed(10 * step + i)
                model(torch.randn(TOKENS, HIDDEN)).float().square().mean().backward()
                tree.add(count=1)
            tree.reduce()
            tpi.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        results.append(testing.full_parameters(model))
    return results


def test_mixed_precision_of_fully_shard():
    with tpi.set_tp_invariant_mode(True):
        for results in run_ranks(half_precision, 8):
            assert_bitwise_equal(results, results[:1] * 3)
    with tpi.set_tp_invariant_mode(False):
        assert len({testing.digest(result) for result in run_ranks(half_precision, 8)[0]}) > 1, "the control"


def not_taken(world_group):
    """What MicroBatchTree says to models of fully_shard over 4 ranks, with 2 ranks of tensor parallelism."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]

    def make(dtype=torch.float32, **options):
        model = nn.Sequential(tpi.Linear(8, 8, parallel_mode="column", tp_group=mesh["tp"], dtype=dtype))
        return fully_shard(model, mesh=dp, **options)

    model = make()
    said = [refused(ValueError, lambda: MicroBatchTree(model.parameters(), dp, 4))]
    fix_reduction_order(model, TokenCount(dp))
    said.append(refused(ValueError, lambda: MicroBatchTree(model.parameters(), dp, 4)))
    fix_reduction_order(model)
    said.append(refused(ValueError, lambda: MicroBatchTree(model.parameters(), dp, 6)))
    alone = nn.Parameter(torch.ones(3))
    said.append(refused(ValueError, lambda: MicroBatchTree([*model.parameters(), alone], dp, 4)))
    said.append(refused(ValueError, lambda: MicroBatchTree(model.parameters(), world_group, 8)))
    tree = MicroBatchTree(model.parameters(), dp, 4)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8)).sum().backward()
    tree.add()
    said.append(refused(RuntimeError, tree.reduce))
    of_group = MicroBatchTree(tpi.Linear(8, 8, parallel_mode="row", tp_group=mesh["tp"]).parameters(), dp, 4)
    of_group.add()
    said.append(refused(ValueError, lambda: of_group.reduce(main_grad=True)))
    half = make(torch.bfloat16)
    fix_reduction_order(half)
    said.append(refused(ValueError, lambda: MicroBatchTree(half.parameters(), dp, 4)))
    rounded = make(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fix_reduction_order(rounded)
    tree = MicroBatchTree(rounded.parameters(), dp, 4)
    rounded(torch.ones(2, 8)).sum().backward()
    said.append(refused(ValueError, tree.add))
    crossed = tpi.Linear(8, 8, parallel_mode="row", tp_group=mesh["tp"])
    said.append(refused(RuntimeError, lambda: MicroBatchTree(crossed.parameters(), _diagonal(), 4)))
    return said


def _diagonal():
    """Ranks 0 and 3, say: of other parts of what is sharded over 0, 1 and over 2, 3."""
    pairs = ((0, 3), (1, 2), (4, 7), (5, 6))
    groups = {ranks: dist.new_group(ranks) for ranks in pairs}
    return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)


def test_what_is_refused_of_models_of_fully_shard():
    texts = (
        "sharded by fully_shard, whose own reduction has another order, or divides by itself: call fix_reduction_ord",
        "call fix_reduction_order(model), without tokens, before MicroBatchTree",
        "micro_batches=6 over 4 ranks of dp_group, with parameters that fully_shard has sharded: the degree must be a",
        "parameter 2 with shape (3,) on rank 0 of dp_group is not sharded over dp_group, and others are, by",
        "of what fully_shard has sharded dp_group must be the ranks of its mesh, which has one dim (no HSDP)",
        "dp_group added [0, 0, 0, 0] micro-batches, but micro_batches=4 gives them [1, 1, 1, 1]: call add() once after",
        "main_grad=True with parameters that are DTensors",
        "torch.bfloat16: each micro-batch's gradient would be rounded, and how often depends on the degree. Take floa",
        "fully_shard reduces gradients in torch.bfloat16: each micro-batch's sum is rounded",
        "the 2 ranks of dp_group disagree: parameter 0 is 'torch.float32 (8, 8), placed as (Shard(dim=1),), here (0,)",
    )
    for said in run_ranks(not_taken, 8)[:1]:
        for text, wanted in zip(said, texts, strict=True):
            assert wanted in text


def test_the_gradient_is_that_of_the_mean_over_all_tokens(one_rank):
    """Against one big batch through torch's own layers in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 24), torch.nn.Tanh(), torch.nn.Linear(24, 5))
    x, labels = torch.randn(40, HIDDEN), torch.randint(5, (40,))
    labels[::3] = -100
    tree = MicroBatchTree(model.parameters(), one_rank, micro_batches=5)
    for i in tree.share:
        part = slice(8 * i, 8 * i + 8)
        torch.nn.functional.cross_entropy(model(x[part]), labels[part], reduction="sum").backward()
        tree.add(count=(labels[part] != -100).sum())
    tree.reduce()
    ours = [p.grad.double() for p in model.parameters()]
    model.zero_grad()
    torch.nn.functional.cross_entropy(model.double()(x.double()), labels).backward()
    for grad, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-7)


def fused(tp_group, take):
    """A layer that adds its weight's gradient into main_grad, under what takes .grad."""
    layer = tpi.Linear(8, 8, tp_group=None, fuse_wgrad_accumulation=take != "bias alone", bias=True)
    layer.weight.main_grad = torch.zeros(8, 8)
    if take == "hook":
        layer = torch.nn.parallel.DistributedDataParallel(layer, process_group=tp_group)
        layer.register_comm_hook(tp_group, tpi.data_parallel.fixed_order_hook)
    with tpi.set_tp_invariant_mode(True):
        layer(torch.ones(2, 8)).sum().backward()
    if take != "hook":
        MicroBatchTree(layer.parameters(), tp_group, micro_batches=2).add()


@pytest.mark.parametrize("take", ["tree", "hook"])
def test_gradients_in_main_grad_are_refused(take):
    run_ranks(fused, 2, "bias alone")  # the control
    text = r"takes gradients from \.grad, but a layer .* parameter \d with shape \(8, 8\) into its main_grad"
    with pytest.raises(testing.RankError, match=text) as caught:
        run_ranks(fused, 2, take)
    assert sorted(caught.value.errors) == [0, 1]


# --- ranks that disagree, and what is refused -----------------------------------------------------------------------


def message_of(fn, world, *args):
    """The one error of all ranks."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, world, *args)
    assert sorted(caught.value.errors) == list(range(world))
    (message,) = {(type(error), str(error)) for error in caught.value.errors.values()}
    return message


def build(tp_group, micro_batches, shapes):
    rank = dist.get_rank(tp_group)
    MicroBatchTree([torch.nn.Parameter(torch.zeros(s)) for s in shapes[rank]], tp_group, micro_batches[rank])


@pytest.mark.parametrize(
    "micro_batches, shapes, what",
    [
        ((4, 8), ([3], [3]), "micro_batches is 4 on rank 0; 8 on rank 1"),
        ((8, 8), ([3, 4], [3]), "number of parameters is 2 on rank 0; 1 on rank 1"),
        ((8, 8), ([3, 4], [3, 5]), "parameter 1 is 'torch.float32 (4,)' on rank 0; 'torch.float32 (5,)' on rank 1"),
    ],
)
def test_ranks_built_differently(micro_batches, shapes, what):
    kind, text = message_of(build, 2, micro_batches, shapes)
    assert kind is RuntimeError and text.startswith(f"the 2 ranks of dp_group disagree: {what}")
    assert text.endswith(
        ". Give MicroBatchTree the same parameters, in the same order, and the same micro_batches on every rank"
    )


def add_and_reduce(tp_group, counts_of_ranks, main_grad=(False, False)):
    """Each rank adds as often as it has counts."""
    p, rank = torch.nn.Parameter(torch.zeros(3)), dist.get_rank(tp_group)
    tree = MicroBatchTree([p], tp_group, micro_batches=4)
    for count in counts_of_ranks[rank]:
        p.grad = torch.ones(3)
        tree.add(count=count)
    tree.reduce(main_grad=main_grad[rank])


@pytest.mark.parametrize(
    "counts, kind, text",
    [
        (
            ([None, None], [None]),
            RuntimeError,
            "the 2 ranks of dp_group added [2, 1] micro-batches, but micro_batches=4 gives them [2, 2]: call add() "
            "once after the backward of each index in `share`",
        ),
        (
            ([1, 1], [1, None]),
            RuntimeError,
            "the 2 ranks of dp_group gave count= to [2, 1] of [2, 2] calls of add(): give it to all of them or to none",
        ),
        (
            ([0, 0], [0, 0]),
            ValueError,
            "the counts that the 2 ranks of dp_group gave are [0, 0] in sum: gradients cannot be divided by 0; skip a "
            "step without tokens on every rank",
        ),
    ],
    ids=["too-few", "some-counts", "no-tokens"],
)
def test_ranks_that_add_differently(counts, kind, text):
    assert message_of(add_and_reduce, 2, counts) == (kind, text)


def steps_with_counts(tp_group, counts_of_steps):
    p, results = torch.nn.Parameter(torch.zeros(3)), []
    tree = MicroBatchTree([p], tp_group, micro_batches=4)
    for count in counts_of_steps:
        for i in tree.share:
            p.grad = torch.full((3,), i + 1.0)
            tree.add(count=count)
        try:
            tree.reduce()
            results.append(p.grad.tolist())
        except ValueError as error:
            results.append(str(error)[:10])
    return results


def test_a_step_after_an_error_starts_anew():
    assert run_ranks(steps_with_counts, 2, (0, 1, 2)) == [["the counts", [2.5] * 3, [1.25] * 3]] * 2


def test_no_group():
    text = "dp_group=None: pass the ProcessGroup or 1-D DeviceMesh whose ranks' gradients are to be summed"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        MicroBatchTree([torch.nn.Parameter(torch.zeros(3))], None, micro_batches=8)
    with pytest.raises(TypeError, match=r"^dp_group='dp' is a str: pass a ProcessGroup"):
        MicroBatchTree([torch.nn.Parameter(torch.zeros(3))], "dp", micro_batches=8)


def test_what_is_refused(one_rank):
    def parameter(dtype, device="cpu"):
        return torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=device))

    with pytest.raises(ValueError, match=r"^micro_batches=0 must be at least 1$"):
        MicroBatchTree([parameter(None)], one_rank, micro_batches=0)
    for micro_batches in (4.0, True):
        with pytest.raises(TypeError, match=f"^micro_batches={micro_batches} is a (float|bool): pass an int$"):
            MicroBatchTree([parameter(None)], one_rank, micro_batches=micro_batches)
    with pytest.raises(ValueError, match=r"^parameters holds no parameter with requires_grad=True"):
        MicroBatchTree([], one_rank, micro_batches=8)
    with pytest.raises(ValueError, match=r"^parameters are on \['cpu', 'meta'\]: build one MicroBatchTree for each"):
        MicroBatchTree([parameter(None), parameter(None, "meta")], one_rank, micro_batches=8)
    with pytest.raises(TypeError, match=r"^parameter 1 with shape \(3,\) is a Parameter of torch.float64: only"):
        MicroBatchTree([parameter(None), parameter(torch.float64)], one_rank, micro_batches=8)
    p = parameter(None)
    tree = MicroBatchTree([p], one_rank, micro_batches=8)
    for count in (1.5, torch.tensor(2.0), torch.tensor([2])):
        with pytest.raises(TypeError, match=f"^count={re.escape(repr(count))} on rank 0 must be an int or a 0-dim"):
            tree.add(count=count)
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=r"^the gradient of parameter 0 with shape \(3,\) on rank 0 is a Tensor of"):
        tree.add()
