"""What is of transformers' Trainer alone: options, the best model, callbacks. See test_trainers.py too."""

from __future__ import annotations

import json
from typing import Any

import hf_models
import numpy
import pytest
import torch
import transformers
from meshes import init_device_mesh
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from trainer_runs import Case, Rows, arguments, parallel, reset, same, without_times

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.diagnostics.diff import compare, read_log
from tp_invariant.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.Trainer, "_prepare_for_training"), reason="the Trainer refuses this version"
)


CASE = Case()


def ours(tp_group: Any, folder: Any, case: Case = CASE, **options: Any) -> Any:
    """A Trainer of this library's, after parallelize."""
    from tp_invariant.integrations.trainer import Trainer

    names = ("eval_dataset", "callbacks", "optimizers")
    others = {name: options.pop(name) for name in names if name in options}
    model, _, dp_group = parallel(tp_group, case)
    data = options.pop("train_dataset", Rows(14))
    given = arguments(folder, gradient_accumulation_steps=options.pop("gradient_accumulation_steps", 2), **options)
    return Trainer(model, given, train_dataset=data, dp_group=dp_group, **others)


def refused(tp_group: Any, folder: Any, error: type[Exception], train: bool = False, **options: Any) -> str:
    try:
        with pytest.raises(error) as caught:
            trainer = ours(tp_group, folder, **options)
            if train:
                trainer.train()
    finally:
        reset()
    return str(caught.value)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def with_another_view(tp_group: Any, folder: Any) -> tuple[Any, Any]:
    """A run whose rank 1 does not see the best checkpoint when it is asked for; and what it then has."""
    import os
    from unittest import mock

    def exists(path: Any, there: Any = os.path.exists) -> bool:
        return there(path) and not (tp_group.rank() == 1 and str(path).endswith("checkpoint-1"))

    try:
        with tpi.set_tp_invariant_mode(True), mock.patch("os.path.exists", exists):
            options = dict(
                eval_dataset=Rows(5, 1), eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1
            )
            trainer = ours(
                tp_group,
                folder,
                max_steps=2,
                load_best_model_at_end=True,
                learning_rate=10.0,
                warmup_steps=0,
                **options,
            )
            trainer.train()
            return trainer.state.best_model_checkpoint, testing.full_parameters(trainer.model)
    finally:
        reset()


def test_rank_0_says_which_checkpoint_is_the_best(tmp_path):
    (best, parameters), other = run_ranks(with_another_view, 2, tmp_path)
    assert best == other[0] == str(tmp_path / "checkpoint-1"), "training has made it worse"
    assert_bitwise_equal(parameters, other[1])
    from safetensors.torch import load_file

    whole = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert_bitwise_equal({name: parameters[name] for name in whole}, whole)


def goes_on_elsewhere(tp_group: Any, folder: Any) -> str:
    """A rank that finds another checkpoint to go on from."""
    try:
        trainer = ours(tp_group, folder, max_steps=2, save_strategy="steps", save_steps=1)
        trainer.train()
        with pytest.raises(ValueError) as caught:
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{tp_group.rank() + 1}"))
        return str(caught.value)
    finally:
        reset()


def test_ranks_that_go_on_from_different_checkpoints_are_refused(tmp_path):
    for text in run_ranks(goes_on_elsewhere, 2, tmp_path):
        assert text.startswith("the 2 ranks differ in resume_from_checkpoint: ")


def by_example(tp_group: Any, folder: str, dp: int) -> None:
    """A rank's part of examples/train_with_trainer.py."""
    from tp_invariant.examples import train_with_trainer as example

    shape = dp, tp_group.size() // dp
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) if tp_group.size() > 1 else None
    options = example.make_parser().parse_args(["--output-dir", folder, "--max-steps", "2"])
    try:
        with tpi.set_tp_invariant_mode(True):
            example.build_trainer(options, mesh, torch.device("cpu")).train()
    finally:
        reset()


def test_the_example(tmp_path):
    for ranks, dp in ((1, 1), (2, 2)):
        (tmp_path / str(dp)).mkdir()
        run_ranks(by_example, ranks, str(tmp_path / str(dp)), dp)
    text, same = compare(*(read_log(str(tmp_path / str(dp) / "digests.log")) for dp in (1, 2)))
    assert same and text.endswith("identical for 2 steps, 0 to 1"), text
    assert json.loads((tmp_path / "2" / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_old_version_of_transformers_is_refused(monkeypatch):
    from tp_invariant.integrations.trainer import Trainer

    monkeypatch.delattr(transformers.Trainer, "_prepare_for_training")
    with pytest.raises(ImportError, match="is too old for this Trainer"):
        Trainer(torch.nn.Linear(4, 4))


REFUSED: dict[str, Any] = dict(
    deepspeed=None, fsdp="full_shard", parallelism_config=None, torch_compile=True, torch_compile_backend="eager",
    torch_compile_mode="default", fp16=None, fp16_full_eval=True, bf16_full_eval=True, tf32=None, use_liger_kernel=True,
    label_smoothing_factor=0.1, neftune_noise_alpha=1.0, auto_find_batch_size=True, batch_eval_metrics=True,
    push_to_hub=True, enable_jit_checkpoint=True, save_on_each_node=True, debug="underflow_overflow",
    ddp_backend="gloo", ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1,
    ddp_broadcast_buffers=True, ddp_static_graph=True,
)  # fmt: skip


def test_every_option_is_honoured_or_refused_by_name(tmp_path):
    """Also those of a later version: a field that is in neither list fails here."""
    import dataclasses

    from tp_invariant.integrations import trainer

    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert names - trainer.HONOURED == set(REFUSED) & names
    assert set(trainer._ADVICE) <= set(REFUSED)


def refusals(tp_group: Any, folder: Any) -> dict[str, str]:
    """What is said of each option that is set, without what transformers refuses here itself (None above)."""
    from tp_invariant.integrations import trainer

    model = hf_models.build("llama")
    said = {}
    for name, value in REFUSED.items():
        args = arguments(folder)
        reset()
        setattr(args, name, "set" if value is None else value)
        with pytest.raises(ValueError) as caught:
            trainer.Trainer(model, args)
        said[name] = str(caught.value)
    return said


def test_options_are_refused_by_name(tmp_path):
    for name, text in run_ranks(refusals, 1, tmp_path)[0].items():
        assert text.startswith(f"TrainingArguments: {name}=") and "on rank 0 is not supported" in text


def refusals_of_two_ranks(tp_group: Any, folder: Any) -> list[str]:
    two = Case(dp=2, shards="group")
    best: dict[str, Any] = dict(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps")
    return [
        refused(tp_group, folder, ValueError, case=two, gradient_accumulation_steps=1),
        refused(tp_group, folder, ValueError, save_only_model=True, eval_dataset=Rows(2), **best),
        refused(tp_group, folder, TypeError, train=True, optim="adafactor"),
        refused(tp_group, folder, ValueError, train=True, case=Case(dtype=torch.bfloat16), optim="sgd"),
        refused(tp_group, folder, ValueError, train=True, train_dataset=Endless()),
        refused(tp_group, folder, ValueError, seed=tp_group.rank()),
        refused(tp_group, folder, ValueError, train=True, train_dataset=Rows(14, tp_group.rank())),
        refused(tp_group, folder, ValueError, train=True, callbacks=[Decays()]),
    ]


class Endless(torch.utils.data.IterableDataset):
    """Without a length, and with an odd number of micro-batches."""

    def __iter__(self) -> Any:
        return iter([Rows(6)[index] for index in range(6)])


class Decays(transformers.TrainerCallback):
    """Differently on each rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.5 ** torch.distributed.get_rank()


def test_what_two_ranks_cannot_honour_is_refused(tmp_path):
    said = run_ranks(refusals_of_two_ranks, 2, tmp_path)[0]
    texts = (
        "gradient_accumulation_steps=1 on rank 0",
        "load_best_model_at_end=True needs",
        "Adafactor of a shard",
        "SGD of a shard",
        "the dataset ended after 1 of a step's 2 micro-batches on rank 0",
        "the 2 ranks differ in TrainingArguments.seed: 0 on rank 0; 1 on rank 1",
        "the 2 ranks differ in the batches of a step",
        "the 2 ranks differ in weight_decay of group 0 of optimizer 0: 1.0 on rank 0; 0.5 on",
    )
    for text, start in zip(said, texts, strict=True):
        assert text.startswith(start), text


def unlike(tp_group: Any) -> None:
    from tp_invariant.integrations.training import Ranks

    rank = tp_group.rank()
    ranks = Ranks(tpi.Linear(4, 4, parallel_mode="column", tp_group=tp_group), None)
    ranks.check_batches([{"cache": object(), "text": "a", "array": numpy.arange(3)}])  # alike
    for part in (str(rank), numpy.arange(3) + rank, torch.arange(3) + rank):
        with pytest.raises(ValueError, match="differ in the batches of a step"):
            ranks.check_batches([{"part": part}])
    with pytest.raises(ValueError, match=r"they must have rank [01] alone in common"):
        Ranks(tpi.Linear(4, 4, parallel_mode="column", tp_group=tp_group), tp_group)


def test_batches_of_any_kind_are_compared():
    run_ranks(unlike, 2)


def refusals_of_fully_shard(tp_group: Any, folder: Any) -> dict[str, str]:
    from tp_invariant.integrations.training import Ranks

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    said = {}

    def refused_ranks(name: str, dp_group: Any, tp: Any = mesh["tp"], over: Any = mesh["dp"], **options: Any) -> None:
        model = tpi.parallelize(hf_models.build("llama", num_hidden_layers=1), tp)
        ignored = {p for p in model.lm_head.parameters()} if options.get("ignored") else None
        fully_shard(model, mesh=over, shard_placement_fn=tpi.fsdp_placement, ignored_params=ignored)
        with pytest.raises(ValueError) as caught:
            Ranks(model, dp_group)
        said[name] = str(caught.value)

    refused_ranks("no dp_group", None)
    refused_ranks("no mesh", mesh["dp"], tp=None)
    refused_ranks("hsdp", mesh["dp"], tp=None, over=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    refused_ranks("ignored", mesh["dp"], ignored=True)
    fully, error = Case(dp=2, shards="fully"), ValueError
    said["odd"] = refused(tp_group, folder, error, case=fully, gradient_accumulation_steps=3)
    said["last step"] = refused(tp_group, folder, error, case=fully, train=True)
    whole: dict[str, Any] = dict(train_dataset=Rows(16), per_device_train_batch_size=1)
    in_16_bits = Case(dp=2, shards="fully", dtype=torch.bfloat16)
    said["bfloat16"] = refused(tp_group, folder, error, case=in_16_bits, train=True, **whole)
    from tp_invariant.integrations.trainer import DigestLogCallback

    log = [DigestLogCallback(str(folder / "log"))]
    said["log"] = refused(tp_group, folder, error, case=fully, train=True, callbacks=log, **whole)
    experts = Case(dp=2, shards="group", experts=True)
    said["log of experts"] = refused(tp_group, folder, error, case=experts, train=True, callbacks=log, **whole)
    said["odd with experts"] = refused(tp_group, folder, error, case=experts, gradient_accumulation_steps=3)
    return said


def test_what_is_refused_of_a_model_of_fully_shard(tmp_path):
    for said in run_ranks(refusals_of_fully_shard, 2, tmp_path):
        assert "over the ranks [0, 1] by fully_shard, whose mesh must have one dim (no HSDP)" in said["no dp_group"]
        assert "and its layer has no DeviceMesh: make it with tp_group=mesh['tp']" in said["no mesh"]
        assert "must have one dim (no HSDP)" in said["hsdp"]
        assert said["ignored"].startswith("lm_head.weight is trained and not sharded by fully_shard, and model.")
        assert said["odd"].startswith("gradient_accumulation_steps says 3 micro-batches on rank")
        assert said["last step"].startswith("an epoch's last step has 1 micro-batches on rank")
        assert "is sharded by fully_shard and torch.bfloat16" in said["bfloat16"]
        assert "(fully_shard): DigestLog needs slices that a rank holds whole" in said["log"]
        assert "experts are divided over data parallel ranks, and it logs" in said["log of experts"]
        assert said["odd with experts"].startswith("gradient_accumulation_steps says 3 micro-batches on rank")


def the_fused_form(tp_group: Any, folder: Any) -> tuple[str, str, bool]:
    trainer = ours(tp_group, folder, optim="adamw_torch_fused")
    trainer.create_optimizer()
    reset()
    return trainer.args.optim, type(trainer.optimizer).__name__, bool(trainer.optimizer.defaults["fused"])


def test_the_fused_form_is_replaced_on_a_cpu(tmp_path):
    """adamw_torch_fused is the default of TrainingArguments."""
    assert run_ranks(the_fused_form, 1, tmp_path)[0] == ("adamw_torch", "AdamW", False)


# --- data parallel ranks of models that draw, change or differ -------------------------------------------------------


class Own(torch.nn.Module):
    """A model of torch's modules: dropout, a layer that is frozen at first, perhaps running statistics."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.frozen, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.between = torch.nn.BatchNorm1d(8) if batch_norm else torch.nn.Dropout(0.3)
        self.frozen.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **others: Any) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.layer_norm(input_ids.float(), (8,))
        return {"loss": self.head(self.between(self.frozen(hidden))).square().mean()}


class Unfreezes(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        model.frozen.requires_grad_(True)


def trained_own(tp_group: Any, folder: Any, dp: int, batch_norm: bool = False, seeded_alike: bool = True) -> Any:
    from tp_invariant.integrations.trainer import Trainer

    torch.manual_seed(0 if seeded_alike else torch.distributed.get_rank())
    model = Own(batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        trainer = Trainer(
            model, arguments(folder, max_steps=4, gradient_accumulation_steps=2), train_dataset=Rows(14),
            callbacks=[Unfreezes()], dp_group=init_device_mesh("cpu", (dp,)), optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.train()
        return {name: p.detach() for name, p in model.named_parameters()}
    except ValueError as error:
        return str(error)
    finally:
        reset()


def test_dropout_and_what_is_unfrozen_at_every_data_parallel_degree(tmp_path):
    """Each micro-batch draws the same, and a parameter that a callback unfreezes is summed over the ranks too."""
    with tpi.set_tp_invariant_mode(True):
        one = run_ranks(trained_own, 1, tmp_path, 1)[0]
        for two in run_ranks(trained_own, 2, tmp_path, 2):
            for name, p in two.items():
                assert_bitwise_equal(p, one[name], name)
    torch.manual_seed(0)
    assert not torch.equal(one["frozen.weight"], Own(False).frozen.weight)


def test_replicas_that_differ_are_refused(tmp_path):
    for options, said in (
        ((False, False), "different values of frozen.weight when training begins"),
        ((True, True), "different values of between.running_mean after a step's forwards"),
    ):
        assert all(said in error for error in run_ranks(trained_own, 2, tmp_path, 2, *options)), said


def decayed(tp_group: Any) -> list[str]:
    from tp_invariant.integrations.trainer import Trainer

    names = Trainer.get_decay_parameter_names
    model = torch.nn.ModuleDict(
        dict(
            ln=tpi.ParallelNorm(4, normalization="LayerNorm", tp_group=tp_group),
            both=tpi.LayerNormLinear(4, 4, tp_group=tp_group),
            plain=torch.nn.LayerNorm(4),
            linear=torch.nn.Linear(4, 4),
        )
    )
    return names(Trainer.__new__(Trainer), model)


def test_norms_decay_as_transformers_own_do():
    assert run_ranks(decayed, 1)[0] == ["both.weight", "linear.weight"]


# --- numbers that are not finite ------------------------------------------------------------------------------------


class Sometimes(torch.nn.Module):
    """Whose loss is NaN for some micro-batches, and its gradient finite, as a mean over no labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        loss = self.linear(input_ids / 96.0).square().mean()
        return {"loss": loss + (float("nan") if int(input_ids.sum()) % 3 == 0 else 0.0)}


def with_nan(tp_group: Any, dp: int, library: bool, folder: str) -> Any:
    from tp_invariant.integrations.trainer import Trainer

    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=8, per_device_train_batch_size=1, gradient_accumulation_steps=3, logging_steps=3,
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, optim="sgd", save_strategy="no",
    )  # fmt: skip
    dp_group = init_device_mesh("cpu", (dp,))
    given = {"model": Sometimes(), "args": arguments, "train_dataset": Rows(20)}
    try:
        trainer: Any = Trainer(**given, dp_group=dp_group) if library else transformers.Trainer(**given)
        return without_times([trainer.train().metrics, trainer.state.log_history])
    finally:
        reset()


def test_losses_that_are_not_finite(tmp_path):
    (expected,) = run_ranks(with_nan, 1, 1, False, str(tmp_path))
    for ranks in (1, 2):
        for got in run_ranks(with_nan, ranks, ranks, True, str(tmp_path)):
            same(got, expected, relative=1e-5)
