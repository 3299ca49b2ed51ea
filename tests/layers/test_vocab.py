"""VocabParallelEmbedding: the table's bytes out, its gradient's bytes the same at every degree; and a whole LM."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from ranks import run_ranks
from same_as_alone import assert_as_alone, run_all
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.consistency.agreement import agreed_in
from tp_invariant.core.layout import shard
from tp_invariant.kernels.vocabulary.reference_embedding import OCCURRENCES_PER_SUM, embedding_grad
from tp_invariant.testing import assert_bitwise_equal, raw_bytes, wide_randn

DEGREES = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPUS = testing.gpu_ranks()


@dataclasses.dataclass(frozen=True)
class Case:
    vocabulary: int = 41
    features: int = 6
    multiple: int = 24  # divides by every degree here
    tokens: tuple[int, ...] = (120,)
    dtype: torch.dtype = torch.float32
    ids_dtype: torch.dtype = torch.int64
    padding_idx: int | None = None
    sequence_parallel: bool = False
    sequence_dim: int = 0
    mode: bool = True
    device: str = "cpu"

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def full_data(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The table, and ids and output gradients of two micro-batches. Half of all ids are one id."""
    g = torch.Generator().manual_seed(3)
    spread = 2 if case.dtype == torch.float16 else 6
    table = wide_randn(case.vocabulary, case.features, generator=g, spread=spread).to(case.dtype)
    integer = {4: torch.int32, 2: torch.int16}[table.element_size()]
    exponent = torch.tensor(torch.inf, dtype=case.dtype).view(integer).item()
    table.view(integer)[7, :4] = torch.tensor([exponent + 1, exponent + 77, -1, 1], dtype=integer)  # NaNs, a subnormal
    table[11] = -0.0
    ids, grads = [], []
    for _ in range(2):
        i = torch.randint(0, case.vocabulary, case.tokens, generator=g)
        i[torch.rand(case.tokens, generator=g) < 0.5] = 11
        ids.append(i.to(case.ids_dtype))
        grads.append(wide_randn(*case.tokens, case.features, generator=g, spread=spread).to(case.dtype))
    return table, ids, grads


def run(tp_group: Any, case: Case) -> dict[str, Tensor]:
    """Outputs for all tokens and the whole table's gradient after two micro-batches, on every rank."""
    group = resolve_group(tp_group)
    table, all_ids, grads = full_data(case)
    sharded = case.sequence_parallel and group.size > 1
    with tpi.set_tp_invariant_mode(case.mode):
        layer = tpi.VocabParallelEmbedding.from_embedding(
            nn.Embedding.from_pretrained(table.to(case.device), freeze=False, padding_idx=case.padding_idx),
            tp_group=tp_group,
            sequence_parallel=case.sequence_parallel,
            sequence_dim=case.sequence_dim,
            pad_vocab_to_multiple_of=case.multiple,
        )
        results = {}
        for step, (ids, dy) in enumerate(zip(all_ids, grads, strict=True)):
            if sharded:
                dy = shard(dy, dim=case.sequence_dim, rank=group.rank, world=group.size)
            y = layer(ids.to(case.device))
            y.backward(dy.to(case.device))
            results[f"y{step}"] = (gather_dim(y.detach(), case.sequence_dim, group) if sharded else y.detach()).cpu()
    grad = layer.weight.grad
    assert grad is not None
    results["dweight"] = testing.full_grads(layer)["weight"].cpu()
    results["padding"] = gather_dim(grad, 0, group)[case.vocabulary :].cpu()
    return results


def without_sp(case: Case) -> Case:
    return case.with_(sequence_parallel=False)


def cases(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Case]:
    base = Case(dtype=dtype, device=device)
    sp = base.with_(sequence_parallel=True)
    return [
        base,
        base.with_(tokens=(3, 7), ids_dtype=torch.int32, padding_idx=11),
        base.with_(tokens=(1,)),  # on most ranks no token to place
        base.with_(tokens=()),
        base.with_(tokens=(0,)),
        base.with_(vocabulary=72, features=33),  # no padding
        sp,
        sp.with_(tokens=(24, 3), padding_idx=3),
        sp.with_(tokens=(3, 24, 2), sequence_dim=1),
    ]


# --- invariance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes_at_every_degree(dtype, degree):
    assert_as_alone(run, cases(dtype), degree, alone=without_sp)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_output_is_the_table(dtype):
    """-0.0, subnormals and the payloads of NaNs come through, as bytes."""
    for case in (Case(dtype=dtype), Case(dtype=dtype, sequence_parallel=True)):
        table, all_ids, _ = full_data(case)
        assert {7, 11} <= set(all_ids[0].tolist())
        for results in run_ranks(run, 4, case):
            for step, ids in enumerate(all_ids):
                assert_bitwise_equal(raw_bytes(results[f"y{step}"]), raw_bytes(table[ids]))


def test_with_the_mode_off_minus_zero_is_lost():
    """The control of the forward: the stock path adds zeros."""
    case = Case(mode=False)
    want = run(None, case)
    for got in run_ranks(run, 2, case):
        with pytest.raises(AssertionError):
            assert_bitwise_equal(got["y0"], want["y0"])
        assert torch.equal(got["y0"].nan_to_num(), want["y0"].nan_to_num())


def test_a_row_sums_its_own_tokens_in_their_order():
    """Other ids in the batch do not count, the order of its own tokens does (so the sum's order shows in this data)."""
    g = torch.Generator().manual_seed(0)
    dy = wide_randn(200, 5, generator=g)
    want = embedding_grad(dy, torch.zeros(200, dtype=torch.int64), 1, torch.float32)
    ids = torch.randint(1, 9, (900,), generator=g)
    mine = torch.randperm(900, generator=g)[:200].sort().values
    ids[mine] = 0
    crowd = wide_randn(900, 5, generator=g)
    crowd[mine] = dy
    assert_bitwise_equal(embedding_grad(crowd, ids, 9, torch.float32)[:1], want)
    reverse = embedding_grad(dy.flip(0), torch.zeros(200, dtype=torch.int64), 1, torch.float32)
    assert not torch.equal(reverse, want)


@pytest.mark.parametrize("count", [1, OCCURRENCES_PER_SUM, OCCURRENCES_PER_SUM + 1, 5 * OCCURRENCES_PER_SUM + 3])
def test_the_order_written_out(count):
    dy = wide_randn(count, 4, generator=torch.Generator().manual_seed(count))
    total = torch.zeros(4)
    for leaf in dy.split(OCCURRENCES_PER_SUM):
        part = torch.zeros(4)
        for row in leaf:
            part += row
        total += part
    got = embedding_grad(dy, torch.full((count,), 2), 4, torch.float32)
    assert_bitwise_equal(got, torch.stack([torch.zeros(4), torch.zeros(4), total, torch.zeros(4)]))


# --- correctness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype, degree, mode):
    chosen = [case.with_(mode=mode) for case in cases(dtype)]
    for case, got in zip(chosen, run_ranks(run_all, degree, run, chosen)[-1], strict=True):
        table, all_ids, grads = full_data(case)
        torchs = nn.Embedding.from_pretrained(table.double(), freeze=False, padding_idx=case.padding_idx)
        for step, (ids, dy) in enumerate(zip(all_ids, grads, strict=True)):
            y = torchs(ids)
            y.backward(dy.double())
            torch.testing.assert_close(got[f"y{step}"].double(), y.detach(), rtol=0, atol=0, equal_nan=True)
        exact = torchs.weight.grad
        # each micro-batch's sum rounded once, and their sum; the stock path adds in the table's dtype
        units = 1.5 if mode else 60
        error = (got["dweight"].double() - exact).norm()
        assert error <= units * torch.finfo(dtype).eps * exact.norm() + 1e-6 * exact.norm(), case
        assert not got["padding"].any()
        if case.padding_idx is not None:
            assert not got["dweight"][case.padding_idx].any()


def test_sixteen_bit_gradients_are_rounded_once():
    """2048 ones and a sixteenth each: in bfloat16 the sum would stand still at 256."""
    dy = torch.full((2048, 2), 1.0625).bfloat16()
    got = embedding_grad(dy, torch.zeros(2048, dtype=torch.int64), 1, torch.bfloat16)
    assert_bitwise_equal(got, torch.full((1, 2), 2176.0).bfloat16())


# --- the module -----------------------------------------------------------------------------------------------------


def build_on_rank(tp_group: Any) -> dict[str, Any]:
    group = resolve_group(tp_group)
    results = {}
    for name, padding_idx, device in (("plain", None, "cpu"), ("padded", -2, "cpu"), ("meta", 4, "meta")):
        torch.manual_seed(5)
        layer = tpi.VocabParallelEmbedding(
            41, 3, padding_idx, tp_group=tp_group, pad_vocab_to_multiple_of=8, device=device
        )
        if device == "meta":
            assert layer.weight.is_meta
            layer.to_empty(device="cpu")
            torch.manual_seed(5)
            layer.reset_parameters()
        assert isinstance(layer, nn.Embedding)
        assert layer.weight.shape == (48 // group.size, 3)
        assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (group.size > 1, 0)
        twin = copy.deepcopy(layer)
        twin.load_state_dict(layer.state_dict())
        results[name] = testing.full_parameters(twin)["weight"]
        assert not gather_dim(layer.weight.detach(), 0, group)[41:].any()
    return results


@pytest.mark.parametrize("degree", [1, 2, 8])
def test_initial_values_are_those_of_torch(degree):
    for results in run_ranks(build_on_rank, degree):
        for name, padding_idx in (("plain", None), ("padded", -2), ("meta", 4)):
            torch.manual_seed(5)
            assert_bitwise_equal(results[name], nn.Embedding(41, 3, padding_idx).weight.detach(), name)


def test_init_method_and_repr():
    layer = tpi.VocabParallelEmbedding(5, 2, 1, init_method=nn.init.ones_, pad_vocab_to_multiple_of=4)
    want = torch.ones(8, 2)
    want[1] = want[5:] = 0
    assert_bitwise_equal(layer.weight.detach(), want)
    assert repr(layer) == "VocabParallelEmbedding(5, 2, padding_idx=1, tp=0/1)"


def test_from_embedding_keeps_what_it_is_given():
    full = nn.Embedding(6, 2, dtype=torch.bfloat16).eval()
    full.weight.requires_grad_(False)
    layer = tpi.VocabParallelEmbedding.from_embedding(full, tp_group=None)
    assert (layer.training, layer.weight.requires_grad, layer.weight.dtype) == (False, False, torch.bfloat16)
    assert_bitwise_equal(layer.weight.detach(), full.weight.detach())
    assert layer.weight.data_ptr() != full.weight.data_ptr()


ERRORS = {
    "an id of the padding": (
        {"pad_vocab_to_multiple_of": 8},
        torch.tensor([6]),
        IndexError,
        "ids holds 6 on rank 0 (1 of 1 ids are out of range): allowed is from 0 to 5",
    ),
    "floats": ({}, torch.zeros(2), TypeError, "ids is torch.float32 on rank 0: it must be torch.int64 or torch.int32"),
    "sequence_dim": (
        {"sequence_parallel": True, "sequence_dim": 1},
        torch.zeros(2, dtype=torch.int64),
        ValueError,
        "sequence_dim=1 is not a dim of ids with shape (2,) on rank 0: it must be from 0 to 0",
    ),
}


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("options", "ids", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_what_forward_refuses(options, ids, kind, text, mode):
    layer = tpi.VocabParallelEmbedding(6, 2, **options)
    with tpi.set_tp_invariant_mode(mode), pytest.raises(kind, match=f"^{re.escape(text)}$"):
        layer(ids)


def test_a_table_of_another_dtype():
    layer = tpi.VocabParallelEmbedding(6, 2, dtype=torch.float64)
    text = "weight is torch.float64 on rank 0: with the mode on it must be one of torch.bfloat16, torch.float16, "
    with tpi.set_tp_invariant_mode(True), pytest.raises(TypeError, match=re.escape(text)):
        layer(torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 1.0}, "embedding.max_norm=1.0 is not supported: it must be None"),
        ({"sparse": True}, "embedding.sparse=True is not supported: it must be False"),
    ],
)
def test_what_from_embedding_refuses(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tpi.VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, **options), tp_group=None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_embeddings": 0}, "num_embeddings=0 must be at least 1"),
        ({"padding_idx": 6}, "padding_idx=6 is out of range: it must be from -6 to 5"),
        ({"pad_vocab_to_multiple_of": 1.5}, "pad_vocab_to_multiple_of=1.5 is not a positive integer"),
    ],
)
def test_what_the_constructor_refuses(options, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tpi.VocabParallelEmbedding(**{"num_embeddings": 6, "embedding_dim": 2, **options})


def refused_on_ranks(tp_group: Any) -> list[str]:
    texts = []
    with tpi.set_tp_invariant_mode(True):
        with pytest.raises(ValueError) as indivisible:
            tpi.VocabParallelEmbedding(5, 2, tp_group=tp_group)
        layer = tpi.VocabParallelEmbedding(6, 2, tp_group=tp_group)
        with pytest.raises(IndexError) as outside:
            layer(torch.tensor([1, 6]))
        with pytest.raises(RuntimeError) as disagreed:
            layer(torch.zeros(2 + tp_group.rank(), dtype=torch.int64))
        texts += [str(caught.value) for caught in (indivisible, outside, disagreed)]
        sharded = tpi.VocabParallelEmbedding(6, 2, tp_group=tp_group, sequence_parallel=True)
        with pytest.raises(ValueError) as uneven:
            sharded(torch.zeros(3, dtype=torch.int64))
    return [*texts, str(uneven.value)]


def test_every_rank_raises():
    for rank, texts in enumerate(run_ranks(refused_on_ranks, 2)):
        assert texts[0] == (
            "num_embeddings=5, padded to 5, is not divisible by TP degree=2: give pad_vocab_to_multiple_of a multiple "
            "of every degree you want, say 128"
        )
        assert texts[1].startswith(f"ids holds 6 on rank {rank} (1 of 2 ids are out of range): allowed is from 0 to 5")
        assert "the shape of ids is (2,) on rank 0; (3,) on rank 1" in texts[2]
        assert texts[3].startswith(f"ids on rank {rank} has shape (3,), of which sequence parallelism takes dim 0")


def with_other_batches(tp_group: Any, what: str, mode: bool) -> list[str]:
    """What a first call says to ids, or a target, that differ between ranks, and with the check a later one."""
    given = {"ids": torch.arange(4), "target": torch.arange(4)}
    given[what] = given[what] + tp_group.rank()
    logits = torch.zeros(4, 8 // tp_group.size())

    def call(ids: torch.Tensor, target: torch.Tensor) -> None:
        layer(ids)
        tpi.vocab_parallel_cross_entropy(logits, target, tp_group=tp_group, z_loss=0.5)

    with tpi.set_tp_invariant_mode(mode), pytest.MonkeyPatch.context() as patch:
        agreed_in(resolve_group(tp_group)).clear()
        layer = tpi.VocabParallelEmbedding(8, 2, tp_group=tp_group)
        with pytest.raises(RuntimeError) as first:
            call(**given)
        call(torch.arange(4), torch.arange(4))  # the group is as usable as before
        call(torch.arange(4), torch.arange(4) + 1)  # other values than before, the same on every rank
        patch.setenv("TP_INVARIANT_CHECK", "1")
        call(torch.arange(4), torch.arange(4))
        with pytest.raises(RuntimeError) as later:
            call(**given)
    return [str(caught.value) for caught in (first, later)]


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("what", ["ids", "target"])
def test_ranks_that_are_given_other_batches(what, mode):
    """Without an error all gradients of whole parameters would be equal, and wrong."""
    one, other = run_ranks(with_other_batches, 2, what, mode)
    assert one == other
    for text in one:
        assert re.search(rf"disagree: the hash of the values of {what} is -?\d+ on rank 0; -?\d+ on rank 1\. ", text)
        assert "Ranks of a tp_group must be given the same batch: a data loader divides it over data parallel" in text


# --- a language model -----------------------------------------------------------------------------------------------


def language_model(tp_group: Any, tied: bool, sequence_parallel: bool, device: str = "cpu") -> dict[str, Any]:
    """Embedding, a layer, output layer and loss: two micro-batches a step, two steps of SGD on the same text."""
    vocabulary, features = 41, 16
    torch.manual_seed(0)
    options = dict(tp_group=tp_group, sequence_parallel=sequence_parallel, device=device)
    embedding = tpi.VocabParallelEmbedding(vocabulary, features, pad_vocab_to_multiple_of=24, **options)
    up = tpi.LayerNormLinear(features, 48, normalization="RMSNorm", parallel_mode="column", bias=False, **options)
    down = tpi.Linear(48, features, parallel_mode="row", bias=False, **options)
    head = tpi.Linear(features, embedding.padded_num_embeddings, parallel_mode="column", bias=False, **options)
    if tied:
        head.weight = embedding.weight
        assert head.weight.partition_dim == 0
    model = nn.ModuleDict({"embedding": embedding, "up": up, "down": down, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = torch.randint(0, vocabulary, (2, 25, 2), device=device)
    results: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for part, ids in enumerate(data):
            x = embedding(ids[:-1])
            x = x + down(up(x))
            loss = tpi.vocab_parallel_cross_entropy(
                head(x), ids[1:], tp_group=tp_group, vocab_size=vocabulary, label_smoothing=0.05, z_loss=1e-4
            )
            loss.backward()
            results[f"loss {step} {part}"] = loss.detach()
        results |= {f"grad {step} {name}": grad for name, grad in testing.full_grads(model).items()}
        optimizer.step()
    return results | testing.full_parameters(model)


@pytest.mark.parametrize(("tied", "sequence_parallel"), [(False, False), (True, True)], ids=["untied", "tied-sp"])
def test_a_language_model_trains_the_same_at_every_degree(tied, sequence_parallel):
    results = testing.assert_tp_invariant(language_model, tied, sequence_parallel, degrees=(1, 2, 4), device="cpu")
    assert results["['loss 1 0']"] < results["['loss 0 0']"]
    assert results["['embedding.weight']"].shape == (41, 16)


# --- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_gpus(dtype, degree):
    if degree > GPUS:
        pytest.skip(f"needs {degree} GPUs")
    large = Case(50257, 512, 128, (2048,), dtype, device="cuda")
    large = [large, large.with_(sequence_parallel=True, tokens=(512, 3), padding_idx=11)]
    assert_as_alone(run, [*cases(dtype, "cuda"), *large], degree, "cuda", alone=without_sp)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_language_model_on_gpus(tied):
    degrees = [degree for degree in (1, 2, 4) if degree <= GPUS]
    testing.assert_tp_invariant(language_model, tied, True, "cuda", degrees=degrees, device="cuda")
