"""Hugging Face models over a DeviceMesh, and what transformers' own functions do after parallelize."""

from __future__ import annotations

import copy
import functools
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
import torch.distributed as dist
from cases import more
from error_texts import refused
from meshes import init_device_mesh
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm import meeting
from tp_invariant.core.dtensors import local_of
from tp_invariant.testing import assert_bitwise_equal


def mesh_or_group(tp_group: Any, kind: str) -> Any:
    return DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",)) if kind == "mesh" else tp_group


# --- bits -----------------------------------------------------------------------------------------------------------


def all_uses(tp_group, family, kind, sequence_parallel, checkpointing, mode):
    """Two steps of training, then generate."""
    model = hf_models.build(family)
    tpi.parallelize(model, mesh_or_group(tp_group, kind), sequence_parallel=sequence_parallel)
    assert {type(p) for p in model.parameters()} == ({DTensor} if kind == "mesh" else {torch.nn.Parameter})
    if checkpointing:
        model.gradient_checkpointing_enable()
    with tpi.set_tp_invariant_mode(mode):
        results = hf_models.train(model, None, 2)
        if not sequence_parallel:
            model.gradient_checkpointing_disable()
            out = model.eval().generate(
                hf_models.batch()["input_ids"][:, :6], max_new_tokens=6, min_new_tokens=6, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            results["generated"] = out.sequences, torch.stack(out.logits)
    return results


@functools.cache
def at_one(family: str, mode: bool) -> Any:
    return run_ranks(all_uses, 1, family, "group", False, False, mode)[0]


# a tie; stacked pieces that are gathered, and projections with biases: between them every kind of layer
@pytest.mark.parametrize(
    "family, degree, sequence_parallel, checkpointing",
    [("qwen3", 4, False, True), ("phi3", 2, False, False), ("llama", 2, True, False), ("gemma3", 4, True, True)],
)
def test_the_bits_over_a_mesh_are_those_of_one_rank(family, degree, sequence_parallel, checkpointing):
    expected = at_one(family, True)
    for got in run_ranks(all_uses, degree, family, "mesh", sequence_parallel, checkpointing, True):
        assert_bitwise_equal(got, {key: expected[key] for key in got})


def test_over_a_mesh_of_one_rank():
    assert_bitwise_equal(run_ranks(all_uses, 1, "qwen3", "mesh", False, False, True)[0], at_one("qwen3", True))


def test_with_the_mode_off_they_are_those_of_plain_shards():
    """The control: not those of one rank. The stock path does not see the mesh."""
    results = run_ranks(all_uses, 2, "phi3", "group", False, False, False)
    plain = [{key: result[key] for key in ("logits", "loss 0", "grads")} for result in results]
    for got, expected in zip(run_ranks(all_uses, 2, "phi3", "mesh", False, False, False), plain, strict=True):
        assert_bitwise_equal({key: got[key] for key in expected}, expected)
    one = at_one("phi3", False)
    assert testing.digest(plain[0]) != testing.digest({key: one[key] for key in plain[0]})


def test_over_a_mesh_the_values_are_right():
    """The error against the model in float64 is at most twice that of the model in float32."""
    ours = run_ranks(all_uses, 2, "phi3", "mesh", False, False, True)[0]
    exact, theirs = {}, {}
    for values, dtype in ((exact, torch.float64), (theirs, torch.float32)):
        model = hf_models.build("phi3", dtype)
        output = model(**hf_models.batch(0))
        output.loss.backward()
        values |= {"logits": output.logits.detach(), "loss 0": output.loss.detach()}
        values |= {name: p.grad for name, p in model.named_parameters()}
    floor = 16 * torch.finfo(torch.float32).eps
    for name, value in exact.items():
        got = ours[name] if name in ours else ours["grads"][name]
        errors = [float((x.double() - value).norm() / value.norm()) for x in (got, theirs[name])]
        assert errors[0] <= max(2 * errors[1], floor), (name, errors)


# --- save_pretrained ------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved(tp_group, family, kind, folder):
    """After a step, so that what is saved is the trained model, and also from a copy of it and its part `model`."""
    with tpi.set_tp_invariant_mode(True):
        model = tpi.parallelize(hf_models.build(family), mesh_or_group(tp_group, kind))
        hf_models.train(model, None, 1)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
    twin.save_pretrained(f"{folder}/{kind}{tp_group.size()}")
    read = Path(f"{folder}/{kind}{tp_group.size()}/model.safetensors").stat().st_size  # it is there on every rank
    twin.save_pretrained(f"{folder}/shards", max_shard_size="40KB", is_main_process=dist.get_rank() == 0)
    twin.model.save_pretrained(f"{folder}/base")
    twin.save_pretrained(f"{folder}/given", state_dict=tpi.full_state_dict(twin))
    return read, tpi.full_state_dict(twin)


@pytest.mark.parametrize("family", [more("qwen3"), more("phi3"), "gpt_oss"])
def test_save_pretrained_writes_whole_weights(tmp_path, family):
    """The files that transformers writes itself of the same weights, and the same model when it is loaded."""
    import transformers

    for kind, degree in (("group", 4), ("mesh", 2), ("mesh", 1)):
        results = run_ranks(saved, degree, family, kind, str(tmp_path))
        folder, full = tmp_path / f"{kind}{degree}", results[0][1]
        plain = hf_models.build(family)
        plain.load_state_dict(full)
        plain.save_pretrained(tmp_path / "plain")
        assert files_in(folder) == files_in(tmp_path / "plain")
        for other in ("", "/../shards", "/../given"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}{other}")
            assert_bitwise_equal(dict(loaded.state_dict()), dict(plain.state_dict()))
        base = transformers.AutoModel.from_pretrained(tmp_path / "base")
        assert_bitwise_equal(dict(base.state_dict()), dict(plain.model.state_dict()))
        assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
        assert torch.equal(loaded.eval()(**hf_models.batch()).logits, plain.eval()(**hf_models.batch()).logits)


def saved_after_fully_shard(world_group, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tpi.parallelize(hf_models.build("qwen3"), mesh["tp"])
    shard_fully(model, mesh["dp"])
    model.save_pretrained(folder)
    return tpi.full_state_dict(model)


def test_save_pretrained_after_fully_shard(tmp_path):
    plain = hf_models.build("qwen3")
    for full in run_ranks(saved_after_fully_shard, 4, str(tmp_path / "sharded")):
        assert_bitwise_equal(full, dict(plain.state_dict()))
    plain.save_pretrained(tmp_path / "plain")
    assert files_in(tmp_path / "sharded") == files_in(tmp_path / "plain")


def saved_on_rank_0(group, folder):
    model = tpi.parallelize(hf_models.build("qwen3"), group)
    meeting._WARN_SECONDS, meeting._WAIT_SECONDS = 0.5, 3.0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("tp_invariant")
    logger.addHandler(handler)
    try:
        if dist.get_rank(group) == 0:
            return refused(RuntimeError, lambda: model.save_pretrained(folder)), said
        return "", said
    finally:
        logger.removeHandler(handler)
        meeting._WARN_SECONDS, meeting._WAIT_SECONDS = 10.0, 1800.0


def test_save_pretrained_on_rank_0_alone(tmp_path):
    (text, (line,)), _ = run_ranks(saved_on_rank_0, 2, str(tmp_path))
    assert text.endswith("call save_pretrained on every rank, not under `if rank == 0`: rank 0 of the job writes, the "
                         "others send")  # fmt: skip
    assert not list(tmp_path.iterdir())
    assert text.startswith(f"save_pretrained({str(tmp_path)!r}) on rank 0 of 2 waits for rank 1, for ")
    assert line.startswith(f"save_pretrained({str(tmp_path)!r}) on rank 0 of 2 waits for rank 1: A rank has only")


def not_written(tp_group, folder):
    model = tpi.parallelize(hf_models.build("qwen3"), tp_group)
    Path(folder, "file").touch()
    texts = [refused(Exception, lambda: model.save_pretrained(f"{folder}/file/below"))]
    with torch.no_grad():
        model.model.norm.weight.add_(dist.get_rank(tp_group))
    return [*texts, refused(RuntimeError, lambda: model.save_pretrained(folder))]


def test_an_error_of_the_rank_that_writes_is_one_of_all(tmp_path):
    for texts in run_ranks(not_written, 2, str(tmp_path)):
        assert texts[0].startswith("save_pretrained failed:\nrank 0 of 2: NotADirectoryError")
        assert "the 2 ranks hold different copies of replicated tensors" in texts[1] and "model.norm.weight" in texts[1]


def given_shards(tp_group, kind, folder):
    model = tpi.parallelize(hf_models.build("qwen3"), mesh_or_group(tp_group, kind))
    return refused(ValueError, lambda: model.save_pretrained(folder, state_dict=model.state_dict()))


def given_after_fully_shard(world_group, tp, folder):
    """Whole weights are written; of a model that nothing but fully_shard has cut, too."""
    # an order of its own: torch keeps an equal mesh of another case, whose groups have ended with that case
    ranks = torch.arange(4).view(tp, 4 // tp).t()
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("data", "tp"))
    model = hf_models.build("qwen3")
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tpi.parallelize(model, mesh["tp"] if tp > 1 else None)
    parts = {name: local_of(tensor) for name, tensor in model.state_dict().items()}
    shard_fully(model, mesh["data"])
    model.save_pretrained(folder, is_main_process=dist.get_rank() == 0, state_dict=full)
    cut = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    given = [model.state_dict(), cut, *([parts] if tp > 1 else [])]
    return [refused(ValueError, lambda one=one: model.save_pretrained(f"{folder}/no", state_dict=one)) for one in given]


@pytest.mark.parametrize("tp", [1, 2])
def test_whole_weights_that_are_given_after_fully_shard(tmp_path, tp):
    import transformers

    for texts in run_ranks(given_after_fully_shard, 4, tp, str(tmp_path / "given")):
        assert all("with this rank's part alone" in text for text in texts)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "given")
    assert_bitwise_equal(dict(loaded.state_dict()), dict(hf_models.build("qwen3").state_dict()))


def late_and_again(world_group, folder):
    """One rank gives up before the other comes; then both come."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    model = tpi.parallelize(hf_models.build("qwen3"), group)
    texts = []
    for rank in range(2):
        if dist.get_rank() == rank:
            with mock.patch.object(meeting, "_WAIT_SECONDS", 1.5):
                texts.append(refused(RuntimeError, lambda: model.save_pretrained(folder)))
        dist.barrier(world_group)
    former = type(model).derived_from[0]
    write = former.save_pretrained

    def slow(*args, **options):  # for longer than the group's time-out
        time.sleep(3)
        write(*args, **options)

    with mock.patch.object(former, "save_pretrained", slow):
        model.save_pretrained(folder)
    return texts


def test_save_pretrained_after_a_rank_came_late_and_for_longer_than_the_time_out(tmp_path):
    for rank, (text,) in enumerate(run_ranks(late_and_again, 2, str(tmp_path / "late"))):
        assert f"on rank {rank} of 2 waits for rank {1 - rank}, for " in text
    hf_models.build("qwen3").save_pretrained(tmp_path / "plain")
    assert files_in(tmp_path / "late") == files_in(tmp_path / "plain")


def saved_without_rank_0(world_group, folder):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model = tpi.parallelize(hf_models.build("qwen3"), group)
    said: list[str] = []
    with mock.patch.object(logging.getLogger("tp_invariant"), "warning", lambda text, *args: said.append(text % args)):
        model.save_pretrained(f"{folder}/{dist.get_rank() // 2}")
    return said


def test_a_model_that_rank_0_has_not_is_not_written(tmp_path):
    zero, one, two, three = run_ranks(saved_without_rank_0, 4, str(tmp_path))
    assert zero == one == three == []
    assert "writes nothing on rank 2, 3, which have this model" in two[0] and two[0].endswith("on rank 2")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_shards_that_are_given_are_refused(tmp_path, kind):
    for rank, text in enumerate(run_ranks(given_shards, 2, kind, str(tmp_path / "new"))):
        wanted = "model.embed_tokens.weight in the state_dict that was given to save_pretrained on rank"
        assert text.startswith(f"{wanted} {rank} is a {'DTensor' if kind == 'mesh' else 'Tensor'} with this rank's ")
        assert text.endswith("part alone: give none, or tp_invariant.full_state_dict(model)")
    assert not (tmp_path / "new").exists()


# --- what is refused ------------------------------------------------------------------------------------------------


def resized(tp_group, kind):
    model = tpi.parallelize(hf_models.build("qwen3"), mesh_or_group(tp_group, kind))
    rows = model.config.vocab_size
    for same in ({}, {"new_num_tokens": rows}, {"new_num_tokens": rows - 1, "pad_to_multiple_of": rows}):
        assert model.resize_token_embeddings(**same) is model.model.embed_tokens
    texts = [refused(ValueError, lambda: model.resize_token_embeddings(100))]
    texts.append(refused(ValueError, lambda: model.resize_token_embeddings(pad_to_multiple_of=64)))
    with tpi.set_tp_invariant_mode(True):
        return texts, model(**hf_models.batch()).logits  # nothing was changed


@pytest.mark.parametrize("kind, degree", [("group", 2), ("mesh", 2), ("group", 1)])
def test_resizing_embeddings_is_for_before(kind, degree):
    expected = at_one("qwen3", True)["logits"]
    for texts, logits in run_ranks(resized, degree, kind):
        assert_bitwise_equal(logits, expected)
        for text, asked in zip(texts, ("100, pad_to_multiple_of=None", "None, pad_to_multiple_of=64"), strict=True):
            assert text.startswith(f"resize_token_embeddings(new_num_tokens={asked}) of a Qwen3ForCausalLM that parall")
            assert text.endswith("Call it before parallelize")


# --- fully_shard over data parallel ranks ---------------------------------------------------------------------------


def shard_fully(model, mesh, **options):
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=tpi.fsdp_placement, **options)


def trained_in_bfloat16(world_group, tp, mode):
    """Two data parallel ranks with batches of their own, each step two of them, reduced in one order."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    mesh = init_device_mesh("cpu", (2 // tp, 2, tp), mesh_dim_names=("copy", "dp", "tp"))
    other = tpi.Linear(8, 8, parallel_mode="column", tp_group=world_group)  # of no concern to the gradients' norm
    model = tpi.parallelize(hf_models.build("qwen3"), mesh["tp"])
    shard_fully(model, mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    tokens = tpi.data_parallel.TokenCount(mesh["dp"])
    tpi.data_parallel.fix_reduction_order(model, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    with tpi.set_tp_invariant_mode(mode):
        for step in range(2):
            optimizer.zero_grad()
            tokens.set(2)
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(**hf_models.batch(4 * step + 2 * last + mesh["dp"].get_local_rank())).loss.backward()
            grads = testing.full_grads(model)
            results.append((grads, tpi.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
    assert other.weight.tensor_model_parallel
    full = tpi.full_state_dict(model)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_bitwise_equal({name: found[name] for name in found}, {name: full[name] for name in found})
    return results, full


@pytest.mark.more
def test_fully_shard_with_mixed_precision_and_accumulation():
    """The bits at TP=1 and 2 beside two data parallel ranks; without the mode others."""
    expected = run_ranks(trained_in_bfloat16, 4, 1, True)[0]
    for got in run_ranks(trained_in_bfloat16, 4, 2, True):
        assert_bitwise_equal(got, expected)
    stock = run_ranks(trained_in_bfloat16, 4, 2, False)[0]
    assert testing.digest(stock) != testing.digest(run_ranks(trained_in_bfloat16, 4, 1, False)[0])
    for name, grad in stock[0][0][0].items():
        torch.testing.assert_close(grad, expected[0][0][0][name], rtol=0.1, atol=0.02)


def replicas_and_shards(world_group):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = tpi.parallelize(hf_models.build("qwen3"), mesh["tp"])
    shard_fully(model, mesh["replicate", "shard"])
    texts = [refused(ValueError, lambda: tpi.data_parallel.fix_reduction_order(model))]
    parameters = list(model.parameters())
    texts.append(refused(ValueError, lambda: tpi.data_parallel.MicroBatchTree(parameters, mesh["replicate"], 2)))
    with tpi.set_tp_invariant_mode(True):
        return texts, hf_models.train(model, None, 2)  # the same batches on all: their mean is exact


def test_replicas_and_shards():
    """HSDP: refused where an order of sums is promised, and right otherwise, in the gradients' norm too."""
    expected = {key: value for key, value in at_one("qwen3", True).items() if key != "generated"}
    for (order, tree), results in run_ranks(replicas_and_shards, 4):
        assert "HSDP, fully_shard on a mesh of replicas and shards, all-reduces gradients over replicas" in order
        assert order.endswith("Give fully_shard all data parallel ranks as one mesh dim")
        assert "dp_group must be the ranks of its mesh, which has one dim (no HSDP)" in tree
        assert_bitwise_equal(results, expected)
