"""What is of Lightning alone: monitors, who logs, stopping, refusals. See test_trainers.py too."""

from __future__ import annotations

import datetime
import os
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from meshes import init_device_mesh
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainer_runs import Case, Rows, fit, module_of, parallel

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal


def trained(tp_group: Any, folder: Any, case: Case, change: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The Trainer of a run of changed modules, and its steps, metrics and parameters."""
    from tp_invariant.integrations.lightning import TensorParallelStrategy

    model, tp, dp_group = parallel(tp_group, case)
    module = module_of(model)
    change(module)
    with tpi.set_tp_invariant_mode(True):
        torch.manual_seed(7)
        strategy = TensorParallelStrategy(tp, dp_group=dp_group)
        data, validation = DataLoader(Rows(case.rows), case.batch), DataLoader(Rows(6, 1), 2)
        trainer = fit(module, folder, data, validation, strategy=strategy, accumulate_grad_batches=2, **options)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return trainer, {"steps": module.steps, "metrics": metrics, "parameters": testing.full_parameters(model)}


def watched(tp_group: Any, folder: Any, case: Case) -> dict[str, Any]:
    """A run in which callbacks and a schedule act on what training_step logs, validation and Lightning's own broadcasts
    come between a step's micro-batches, and a Metric counts the batches of validation."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from torchmetrics import SumMetric

    saving = [
        ModelCheckpoint(folder, "{step}-{validation:.6f}", monitor="validation", every_n_train_steps=1),
        ModelCheckpoint(folder, "{epoch}-{mean_epoch:.6f}", monitor="mean_epoch", save_on_train_epoch_end=True),
        ModelCheckpoint(folder, "timed-{step}", train_time_interval=datetime.timedelta(hours=1)),
    ]
    stopping = EarlyStopping("most", patience=2, check_on_train_epoch_end=True)
    rates = []

    def change(module: Any) -> None:
        module.counted = SumMetric()
        train, validate = module.training_step, module.validation_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            loss = train(batch, batch_idx)
            module.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
            module.log_dict({"most": loss}, on_step=False, on_epoch=True, reduce_fx="max")
            third = loss.detach() / 3
            module.log("third", third, on_step=False, on_epoch=True, reduce_fx="avg")
            third.zero_()
            return loss

        def log(name: str, *args: Any, **kwargs: Any) -> None:
            type(module).log(module, name.replace("third", "a third"), *args, **kwargs)

        def validation_step(batch: Any, batch_idx: int) -> None:
            validate(batch, batch_idx)
            module.counted.update(1.0)
            module.log("counted", module.counted, on_epoch=True)

        def configure_optimizers() -> Any:
            made = torch.optim.AdamW(module.parameters(), lr=1e-2)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=0.0)
            schedule = {"scheduler": plateau, "interval": "step", "monitor": "last"}
            return {"optimizer": made, "lr_scheduler": schedule}

        def on_train_batch_end(*args: Any) -> None:
            rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

        module.training_step, module.validation_step, module.log = training_step, validation_step, log
        module.configure_optimizers, module.on_train_batch_end = configure_optimizers, on_train_batch_end

    _, run = trained(
        tp_group, folder, case, change, max_steps=4, val_check_interval=1, max_time="01:00:00:00", limit_val_batches=2,
        callbacks=[stopping, *saving], enable_checkpointing=True,
    )  # fmt: skip
    files = [Path(each.best_model_path).name for each in saving]
    return {**run, "rates": rates, "files": files}


@pytest.mark.more
def test_monitors_see_the_metrics_of_one_process(tmp_path):
    options: dict[str, Any] = dict(rows=8, batch=2)
    (one,) = run_ranks(watched, 1, tmp_path / "1", Case(shards="group", **options))
    assert one["metrics"]["counted"] == 2.0 and len({*one["rates"]}) > 1
    assert {"last", "mean_step", "mean_epoch", "most"} < {*one["metrics"]} and len(one["steps"]) > 2
    losses = [loss for loss, *_ in one["steps"][-2:]]
    assert one["metrics"]["mean_epoch"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert one["metrics"]["a third"] == pytest.approx(one["metrics"]["mean_epoch"] / 3, rel=1e-6)
    for ranks, shards in ((4, "group"), (2, "fully")):
        for got in run_ranks(watched, ranks, tmp_path / shards, Case(dp=2, shards=shards, **options)):
            assert_bitwise_equal(got, one)


def stop_at_the_fourth(module: Any) -> None:
    train = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            module.trainer.should_stop = True
        return train(batch, batch_idx)

    module.training_step = training_step


def stopped(tp_group: Any, folder: Any, case: Case) -> dict[str, Any]:
    return trained(tp_group, folder, case, stop_at_the_fourth, max_steps=8)[1]


def test_one_rank_stops_all(tmp_path):
    (one,) = run_ranks(stopped, 1, tmp_path / "1", Case(shards="group"))
    assert len(one["steps"]) == 2
    for got in run_ranks(stopped, 2, tmp_path / "2", Case(dp=2)):
        assert_bitwise_equal(got, one)


def written(tp_group: Any, folder: Any) -> Any:
    """Parameters of a run, and those of an unsharded model that Lightning's own way of loading has given its file's."""
    trainer, run = trained(tp_group, folder, Case(), lambda module: None, max_steps=1)
    trainer.save_checkpoint(folder / "last.ckpt")
    module = module_of(parallel(tp_group, Case(library=False))[0])
    module.load_state_dict(torch.load(folder / "last.ckpt", weights_only=False)["state_dict"])
    return run["parameters"], {name: p.detach() for name, p in module.model.named_parameters()}


def test_checkpoints_are_those_of_the_whole_model(tmp_path):
    for trained_ones, loaded in run_ranks(written, 2, tmp_path):
        assert_bitwise_equal(trained_ones, loaded)


def by_example(tp_group: Any, dp: int = 0, mode: bool = True) -> str:
    from tp_invariant.examples import train_with_lightning as example

    groups: tuple[Any, Any] = tp_group, None
    if dp:
        mesh = init_device_mesh("cpu", (dp, tp_group.size() // dp), mesh_dim_names=("dp", "tp"))
        groups = mesh["tp"], mesh["dp"]
    options = example.make_parser().parse_args(["--steps", "1"])
    with tpi.set_tp_invariant_mode(mode):
        return example.train(groups[0], options, torch.device("cpu"), groups[1])


def test_the_example():
    digests = [run_ranks(by_example, *degrees) for degrees in ((1,), (4,), (4, 2), (4, 4))]
    assert len({digest for found in digests for digest in found}) == 1
    assert run_ranks(by_example, 4, 4, False)[0] != run_ranks(by_example, 4, 0, False)[0], "the control"


def squares(model: Any) -> Any:
    """A module whose loss is that of plain tensors."""
    module = module_of(model)
    module.training_step = lambda batch, batch_idx: module.model(batch).square().mean()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    return module


def refusals(tp_group: Any, folder: Any) -> dict[str, str]:
    from tp_invariant.integrations.lightning import TensorParallelStrategy

    said = {}

    def refused(name: str, error: Any = ValueError, change: Any = None, group: Any = tp_group, **options: Any) -> None:
        module = squares(tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group, gather_output=True))
        if change is not None:
            module.configure_optimizers = lambda: change(module.parameters())
        data = options.pop("data", torch.ones(8, 8))
        with pytest.raises(error) as caught:
            fit(module, folder, DataLoader(data, 2), max_steps=1, strategy=TensorParallelStrategy(group), **options)
        said[name] = str(caught.value)

    refused("precision", precision="64-true")
    refused("optimizer", TypeError, change=torch.optim.Adafactor)
    refused("group", group=None)
    refused("batches", data=torch.ones(8, 8) * tp_group.rank())
    with mock.patch.dict(os.environ, WORLD_SIZE="4"), pytest.raises(ValueError) as caught:
        TensorParallelStrategy(tp_group)
    said["part of the job"] = str(caught.value)
    return said


def test_what_is_refused(tmp_path):
    said = run_ranks(refusals, 2, tmp_path)[0]
    where = "on rank 0, with 2 tensor parallel and 1 data parallel ranks, is not supported"
    assert said["precision"].startswith(f"Trainer(precision='64-true') {where}")
    assert said["optimizer"].startswith("Adafactor of a shard")
    assert said["group"].startswith("the model is sharded over the ranks [0, 1], and the strategy's tp_group has [0]")
    assert said["batches"].startswith("the 2 ranks differ in the batches of a step")
    assert said["part of the job"].startswith("the job has 4 ranks, tp_group has 2, and dp_group 1: give dp_group")


def refusals_of_data_parallel_ranks(tp_group: Any, folder: Any) -> list[str]:
    from tp_invariant.integrations.lightning import TensorParallelStrategy

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    rank, said = tp_group.rank(), []

    def refused(
        seed: int = 0, manual: bool = False, model: Any = None, data: Any = None, change: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        module = squares(torch.nn.Linear(4, 4) if model is None else model())
        module.automatic_optimization = not manual
        if change is not None:
            change(module)
        strategy = TensorParallelStrategy(None, dp_group=mesh["dp"])
        loader = DataLoader(torch.arange(32.0).view(8, 4) if data is None else data, 2)
        given = dict(max_steps=8, accumulate_grad_batches=2, gradient_clip_val=None) | options
        with pytest.raises(ValueError) as caught:
            fit(module, folder, loader, strategy=strategy, **given)
        said.append(str(caught.value))

    refused(accumulate_grad_batches=1)
    refused(manual=True, accumulate_grad_batches=1)
    refused(seed=rank)
    refused(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    refused(data=Endless(), accumulate_grad_batches=3)
    refused(change=log_a_metric)
    refused(change=take_an_iterator)
    refused(change=lambda module: change_rate(module, rank))
    refused(change=leave_out)
    refused(model=lambda: fully_shard(torch.nn.Linear(4, 4), mesh=mesh["dp"]), data=torch.ones(6, 4))
    return said


def log_a_metric(module: Any) -> None:
    from torchmetrics import SumMetric

    module.metric, step = SumMetric(), module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        module.metric.update(1.0)
        module.log("metric", module.metric)
        return step(batch, batch_idx)

    module.training_step = training_step


def take_an_iterator(module: Any) -> None:
    module.training_step = types.MethodType(lambda self, dataloader_iter: None, module)


def leave_out(module: Any) -> None:
    module.training_step = lambda batch, batch_idx: None


def change_rate(module: Any, rank: int) -> None:
    def on_train_batch_end(*args: Any) -> None:
        module.trainer.optimizers[0].param_groups[0]["betas"] = (0.9, 0.5**rank)

    module.on_train_batch_end = on_train_batch_end


def who_logs(tp_group: Any, folder: Any) -> list[int]:
    """What Lightning takes for this rank's number, in a Trainer's first run, its second, and after it."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from tp_invariant.integrations.lightning import TensorParallelStrategy

    seen, module = [], squares(torch.nn.Linear(4, 4))
    module.validation_step = lambda batch, batch_idx: None
    module.on_fit_start = module.on_validation_start = lambda: seen.append(rank_zero_only.rank)
    loader = DataLoader(torch.arange(32.0).view(8, 4), 4)
    strategy = TensorParallelStrategy(None, dp_group=init_device_mesh("cpu", (2,)))
    trainer = fit(module, folder, loader, strategy=strategy, max_steps=1, accumulate_grad_batches=2)
    trainer.validate(module, loader, verbose=False)
    return [*seen, rank_zero_only.rank]


def test_rank_0_alone_logs_in_a_second_run_too(tmp_path):
    assert run_ranks(who_logs, 2, tmp_path) == [[0, 0, 0], [1, 1, 0]]


class Endless(torch.utils.data.IterableDataset):
    """Of five batches of two, where a step has three."""

    def __iter__(self) -> Any:
        return iter(torch.ones(10, 4))


def test_what_is_refused_of_data_parallel_ranks(tmp_path):
    said = run_ranks(refusals_of_data_parallel_ranks, 2, tmp_path)[0]
    where = "on rank 0, with 1 tensor parallel and 2 data parallel ranks, is not supported"
    texts = (
        "accumulate_grad_batches=1 on rank 0, and dp_group has 2 ranks",
        f"automatic_optimization=False {where}",
        "the 2 data parallel ranks hold different values of model.weight when training begins",
        "the 2 data parallel ranks hold different values of model.1.running_mean after a step's forwards",
        "the loader ended after 2 of a step's 3 micro-batches on rank 0",
        "training_step logs 'metric', a Metric of torchmetrics, on rank 0",
        f"training_step(dataloader_iter) {where}",
        "the 2 ranks differ in betas of group 0 of optimizer 0: (0.9, 1.0) on rank 0; (0.9, 0.5)",
        "training_step returned None for micro-batch ",
        "an epoch's last step has 1 micro-batches on rank 0, and dp_group has 2 ranks",
    )
    for text, start in zip(said, texts, strict=True):
        assert text.startswith(start), text
