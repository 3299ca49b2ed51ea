"""Lightning over tensor parallel ranks: the bits of one process at every degree."""

from __future__ import annotations

import datetime
import os
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
from meshes import init_device_mesh, mesh_or_group, shard_fully
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal


def examples(count: int = 20) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, hf_models.VOCABULARY, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def build(dtype: torch.dtype = torch.float32, family: str = "llama") -> Any:
    return hf_models.build(family, dtype, num_hidden_layers=1)


def module_of(model: Any, optimizer: str = "AdamW", dropout: float = 0.0) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.step_losses: list[float] = []
            self.dropout = torch.nn.Dropout(dropout)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.dropout(self.model(**batch).loss[None]).sum() if dropout else self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.model(**batch).loss, sync_dist=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            loss = getattr(self.trainer.strategy, "step_loss", None)
            if loss is not None:
                self.step_losses.append(loss.item())
            self.norms.append(float(tpi.clip_grad_norm_(self.parameters(), float("inf"))))

        def configure_optimizers(self) -> Any:
            made = getattr(torch.optim, optimizer)(self.parameters(), lr=1e-2)
            return [made], [{"scheduler": torch.optim.lr_scheduler.StepLR(made, 3, 0.5), "interval": "step"}]

    return Module()


def fit(
    module: Any,
    folder: Any,
    steps: int = 10,
    resume: Any = None,
    seed: int = 7,
    workers: int = 0,
    data: Any = None,
    validation: Any = None,
    count: int = 20,
    **options: Any,
) -> Any:
    import lightning

    lightning.seed_everything(seed, workers=True, verbose=False)
    given = dict(
        accelerator="cpu", devices=1, max_steps=steps, accumulate_grad_batches=3, gradient_clip_val=1.0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
        enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few workers, and so on
        trainer = lightning.Trainer(**{**given, **options})
        by_epoch = DistributedSampler(examples(count), num_replicas=1, rank=0, seed=seed)
        loader = DataLoader(examples(count), 2, sampler=by_epoch, num_workers=workers)
        if data is None:
            trainer.fit(module, loader, DataLoader(examples(6), 2), ckpt_path=resume, weights_only=False)
        else:
            trainer.fit(module, data, validation)
    return trainer


def trained(
    tp_group: Any,
    folder: Any,
    kind: str = "group",
    mode: bool = True,
    dp: int = 1,
    dropout: float = 0.0,
    change: Any = None,
    over_all: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """over_all: the model is a mixture, whose experts are divided over all ranks."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tp_invariant.integrations.lightning import TensorParallelStrategy

    group, dp_group = mesh_or_group(tp_group, kind), None
    if dp > 1:
        mesh = init_device_mesh("cpu", (dp, tp_group.size() // dp), mesh_dim_names=("dp", "tp"))
        group, dp_group = mesh["tp"].get_group() if kind == "group" else mesh["tp"], mesh["dp"]
    with tpi.set_tp_invariant_mode(mode):
        experts = mesh_or_group(tp_group, "group" if kind == "group" else "mesh") if over_all else None
        model = tpi.parallelize(build(family="mixtral" if over_all else "llama"), group, expert_parallel_group=experts)
        if kind == "fully":
            shard_fully(model, dp_group)
        module = module_of(model, dropout=dropout)
        if change is not None:
            change(module)
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
        options = (
            dict(
                strategy=TensorParallelStrategy(group, dp_group=dp_group), callbacks=[saving], enable_checkpointing=True
            )
            | options
        )
        trainer = fit(module, folder, **options)
        return {
            "losses": module.losses,
            "step losses": module.step_losses,
            "norms": module.norms,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "parameters": testing.full_parameters(module.model),
        }


def with_options(tp_group: Any, function: Any, folder: Any, options: dict[str, Any]) -> Any:
    return function(tp_group, folder, **options)


def run_on(degree: int, folder: Any, function: Any = trained, **options: Any) -> list[Any]:
    return run_ranks(with_options, degree, function, folder, options)


@pytest.fixture(scope="module")
def at_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (one,) = run_on(1, folder)
    return one, folder


def files_of(folder: Path) -> dict[str, Any]:
    """The checkpoints in a folder, without what Lightning has of its own files and times."""
    loaded = {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.ckpt"))}
    return {
        name: {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
        for name, checkpoint in loaded.items()
    }


@pytest.mark.parametrize("degree, kind", [(2, "mesh"), (4, "group")])
def test_ten_steps_have_the_bits_of_one_process(at_one, tmp_path, degree, kind):
    """Losses, norms, metrics, parameters, and the checkpoints, which rank 0 alone writes."""
    expected, folder = at_one
    assert len(expected["norms"]) == 10 and set(expected["metrics"]) == {"loss", "validation"}
    for got in run_on(degree, tmp_path, kind=kind):
        assert_bitwise_equal(got, expected)
    written = files_of(tmp_path)
    assert sorted(written) == ["step=10.ckpt", "step=4.ckpt", "step=8.ckpt"]
    assert_bitwise_equal(written, files_of(folder))


def of_all(run: dict[str, Any]) -> dict[str, Any]:
    """Without what a rank logs of its own micro-batches."""
    return {
        **{name: run[name] for name in ("step losses", "norms", "parameters")},
        "validation": run["metrics"].get("validation"),
    }


@pytest.mark.parametrize("ranks, kind", [(4, "mesh"), (2, "group")])
def test_data_parallel_ranks_have_the_bits_of_one_process(at_one, tmp_path, ranks, kind):
    """Ten steps at 2 x 2 and 2 x 1: of three micro-batches, an epoch's last one of one; and the checkpoints."""
    expected, folder = at_one
    runs = run_on(ranks, tmp_path, kind=kind, dp=2)
    for got in runs:
        assert_bitwise_equal(of_all(got), of_all(expected))
    assert len(expected["step losses"]) == 10
    losses = expected["losses"][:3]
    assert expected["step losses"][0] == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert runs[0]["losses"][:2] == losses[:2] and runs[-1]["losses"][0] == losses[2]
    assert_bitwise_equal(files_of(tmp_path), files_of(folder))


def test_a_model_of_fully_shard(tmp_path):
    """Six steps at 2 x 2 and 4 x 1, the checkpoints, and runs that go on from them."""
    options: dict[str, Any] = dict(accumulate_grad_batches=4, count=16, steps=6)
    (one,) = run_on(1, tmp_path / "1", **options)
    assert len(one["step losses"]) == 6 and one["step losses"][-1] < one["step losses"][0] - 1, "it trains"
    for dp in (2, 4):
        for got in run_on(4, tmp_path / str(dp), kind="fully", dp=dp, **options):
            assert_bitwise_equal(of_all(got), of_all(one))
        assert_bitwise_equal(files_of(tmp_path / str(dp)), files_of(tmp_path / "1"))
    options["resume"] = str(tmp_path / "2" / "step=4.ckpt")
    (rest,) = run_on(1, tmp_path / "rest", **options)
    assert len(rest["norms"]) == 2
    for got in run_on(2, tmp_path / "two", kind="fully", dp=2, **options):
        assert_bitwise_equal(of_all(got), of_all(rest))


def test_experts_over_data_parallel_ranks(tmp_path):
    """Of a mixture, with fully_shard of the rest and without; and what is written."""
    options: dict[str, Any] = dict(accumulate_grad_batches=4, count=16, steps=2, over_all=True)
    (one,) = run_on(1, tmp_path / "1", **options)
    for ranks, kind in ((4, "fully"), (2, "group")):
        for got in run_on(ranks, tmp_path / kind, kind=kind, dp=2, **options):
            assert_bitwise_equal(of_all(got), of_all(one))
        assert_bitwise_equal(files_of(tmp_path / kind), files_of(tmp_path / "1"))


def watched(tp_group: Any, folder: Any, **options: Any) -> dict[str, Any]:
    """A run in which callbacks and a schedule act on what training_step logs, validation and Lightning's own broadcasts
    come between a step's micro-batches, and a Metric counts the batches of validation."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from torchmetrics import SumMetric

    saving = [
        ModelCheckpoint(folder, "{step}-{loss:.6f}", monitor="loss", every_n_train_steps=1),
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
            schedule = {"scheduler": plateau, "interval": "step", "monitor": "loss"}
            return {"optimizer": made, "lr_scheduler": schedule}

        def on_train_batch_end(*args: Any) -> None:
            rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

        module.training_step, module.validation_step, module.log = training_step, validation_step, log
        module.configure_optimizers, module.on_train_batch_end = configure_optimizers, on_train_batch_end

    given: dict[str, Any] = dict(
        steps=4, count=8, accumulate_grad_batches=2, val_check_interval=1, max_time="01:00:00:00"
    )
    given |= dict(limit_val_batches=2, callbacks=[stopping, *saving])
    run = trained(tp_group, folder, change=change, **given, **options)
    files = [Path(each.best_model_path).name for each in saving]
    return {**of_all(run), "metrics": run["metrics"], "rates": rates, "files": files}


def test_monitors_see_the_metrics_of_one_process(tmp_path):
    (one,) = run_on(1, tmp_path / "1", watched)
    assert one["metrics"]["counted"] == 2.0 and len({*one["rates"]}) > 1
    assert {"loss", "mean_step", "mean_epoch", "most"} < {*one["metrics"]} and len(one["norms"]) > 2
    assert one["metrics"]["mean_epoch"] == pytest.approx(sum(one["step losses"][-2:]) / 2, rel=1e-6)
    assert one["metrics"]["a third"] == pytest.approx(one["metrics"]["mean_epoch"] / 3, rel=1e-6)
    for ranks, kind in ((4, "group"), (2, "fully")):
        for got in run_on(ranks, tmp_path / kind, watched, kind=kind, dp=2):
            assert_bitwise_equal(got, one)


def stop_at_the_fourth(module: Any) -> None:
    train = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            module.trainer.should_stop = True
        return train(batch, batch_idx)

    module.training_step = training_step


def test_one_rank_stops_all(tmp_path):
    options: dict[str, Any] = dict(change=stop_at_the_fourth, accumulate_grad_batches=2)
    (one,) = run_on(1, tmp_path / "1", **options)
    assert len(one["norms"]) == 2
    for got in run_on(2, tmp_path / "2", dp=2, **options):
        assert_bitwise_equal(of_all(got), of_all(one))


def test_dropout_at_every_data_parallel_degree(tmp_path):
    options = dict(dropout=0.4, steps=3)
    (one,), two = (run_on(n, tmp_path / str(n), dp=n, **options) for n in (1, 2))
    for got in two:
        assert_bitwise_equal(of_all(got), of_all(one))
    assert 0.0 in one["losses"], "the mask"


def test_a_run_goes_on_at_another_degree(at_one, tmp_path):
    """From a checkpoint of TP=1, at 1, TP=2 and 2 x 2. With which batches is up to Lightning."""
    expected, folder = at_one
    options = dict(resume=str(folder / "step=4.ckpt"))
    (one,) = run_on(1, tmp_path / "1", **options)
    assert len(one["norms"]) == 6 and max(one["losses"]) < max(expected["losses"][:10]) - 0.5, "it goes on"
    for got in run_on(2, tmp_path / "2", **options):
        assert_bitwise_equal(got, one)
    for got in run_on(4, tmp_path / "4", dp=2, **options):
        assert_bitwise_equal(of_all(got), of_all(one))


def loaded(tp_group: Any, folder: Any) -> Any:
    """The parameters of an unsharded model that Lightning's own way of loading has given the checkpoint's."""
    module = module_of(build())
    module.load_state_dict(torch.load(folder / "step=10.ckpt", weights_only=False)["state_dict"])
    return {name: p.detach() for name, p in module.model.named_parameters()}


def test_checkpoints_are_those_of_the_whole_model(at_one):
    expected, folder = at_one
    assert_bitwise_equal(run_ranks(loaded, 1, folder)[0], expected["parameters"])


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


def test_autocast_and_a_worker(tmp_path):
    options = dict(precision="bf16-mixed", steps=3, workers=1)
    (one,), two = (run_on(degree, tmp_path / str(degree), **options) for degree in (1, 2))
    for got in two:
        assert_bitwise_equal(got, one)


def theirs(tp_group: Any, folder: Any, dtype: torch.dtype) -> Any:
    module = module_of(build(dtype))
    fit(module, folder)
    return module.losses


def test_the_values_are_those_of_lightnings_own(at_one, tmp_path):
    exact, single = (run_ranks(theirs, 1, tmp_path, dtype)[0] for dtype in (torch.float64, torch.float32))
    errors = [max(abs(a / b - 1) for a, b in zip(x, exact, strict=True)) for x in (at_one[0]["losses"], single)]
    assert errors[0] <= max(4 * errors[1], 1e-5), errors
    assert at_one[0]["losses"][-1] < at_one[0]["losses"][0] - 1, "it trains"


def test_with_the_mode_off_the_bits_depend_on_the_degree(tmp_path):
    one, two = (run_on(degree, tmp_path / str(degree), mode=False, steps=3)[0] for degree in (1, 2))
    assert testing.digest(one) != testing.digest(two)
    options: dict[str, Any] = dict(mode=False, steps=2, accumulate_grad_batches=2)
    (alone,) = run_on(1, tmp_path / "alone", **options)
    for kind in ("group", "fully"):
        four = run_on(4, tmp_path / kind, dp=2, kind=kind, **options)[0]
        assert testing.digest(of_all(four)) != testing.digest(of_all(alone))
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-4)


def refusals(tp_group: Any, folder: Any) -> dict[str, str]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from tp_invariant.integrations.lightning import TensorParallelStrategy

    said = {}

    def refused(
        name: str, error: type[Exception], optimizer: str = "AdamW", group: Any = tp_group, **options: Any
    ) -> None:
        strategy = options.pop("strategy", None) or TensorParallelStrategy(group)
        module = module_of(tpi.parallelize(build(), tp_group), optimizer)
        with pytest.raises(error) as caught:
            fit(module, folder, strategy=strategy, **options)
        said[name] = str(caught.value)

    refused("precision", ValueError, precision="64-true")
    refused("optimizer", TypeError, optimizer="Adafactor")
    refused("group", ValueError, group=None)
    refused("batches", ValueError, seed=tp_group.rank())
    refused("averages", ValueError, callbacks=[StochasticWeightAveraging(1e-3)])
    with mock.patch.dict(os.environ, WORLD_SIZE="4"), pytest.raises(ValueError) as caught:
        TensorParallelStrategy(tp_group)
    said["part of the job"] = str(caught.value)
    return said


def test_what_is_refused(tmp_path):
    said = run_ranks(refusals, 2, tmp_path)[0]
    assert said["precision"].startswith("Trainer(precision='64-true') on rank 0 is not supported")
    assert said["optimizer"].startswith("Adafactor on rank 0 is not known")
    assert said["group"].startswith("the model is sharded over the ranks [0, 1], and the strategy's tp_group has [0]")
    assert said["batches"].startswith("the 2 ranks differ in the batches of a step")
    assert said["averages"].startswith("StochasticWeightAveraging on rank 0, with 2 tensor parallel and 1 data")
    assert said["part of the job"].startswith("the job has 4 ranks, tp_group has 2, and dp_group 1: give dp_group")


def refusals_of_data_parallel_ranks(tp_group: Any, folder: Any) -> list[str]:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder

    from tp_invariant.integrations.lightning import TensorParallelStrategy

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    rank, said, plain = tp_group.rank(), [], DataLoader(torch.arange(32.0).view(8, 4), 2)

    def refused(
        seed: int = 0, manual: bool = False, norm: bool = False, loader: Any = None, change: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        module = module_of(torch.nn.Linear(4, 4))
        norms = torch.nn.BatchNorm1d(4) if norm else torch.nn.Identity()
        module.norms_of = norms
        module.automatic_optimization = not manual
        module.training_step = lambda batch, batch_idx: norms(module.model(batch)).square().mean()
        if change is not None:
            change(module)
        strategy = TensorParallelStrategy(mesh["tp"].get_group(), dp_group=mesh["dp"])
        with pytest.raises(ValueError) as caught:
            fit(module, folder, strategy=strategy, data=plain if loader is None else loader, **options)
        said.append(str(caught.value))

    refused(accumulate_grad_batches=1)
    refused(manual=True, gradient_clip_val=None, accumulate_grad_batches=1)
    refused(seed=rank)
    refused(norm=True)
    refused(loader=DataLoader(Endless(), 2))
    refused(change=log_of_its_own, validation=plain, callbacks=[EarlyStopping("own")])
    refused(change=log_a_metric)
    refused(change=take_an_iterator)
    refused(change=lambda module: change_rate(module, rank))
    refused(val_check_interval="00:01:00:00")
    refused(change=leave_out)
    refused(callbacks=[LearningRateFinder()])
    refused(change=log_a_gradient)
    module = module_of(fully_shard(torch.nn.Linear(4, 4), mesh=mesh["dp"]))
    strategy = TensorParallelStrategy(None, dp_group=mesh["dp"])
    with pytest.raises(ValueError) as caught:
        fit(module, folder, strategy=strategy, accumulate_grad_batches=4, count=18)
    return [*said, str(caught.value)]


def log_of_its_own(module: Any) -> None:
    rank = torch.distributed.get_rank()
    module.validation_step = lambda batch, batch_idx: module.log("own", float(rank))


def log_a_gradient(module: Any) -> None:
    module.on_after_backward = lambda: module.log("gradient", module.model.weight.grad.norm())


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

    seen, module = [], module_of(torch.nn.Linear(4, 4))
    module.training_step = lambda batch, batch_idx: module.model(batch).square().mean()
    module.validation_step = lambda batch, batch_idx: None
    module.on_fit_start = module.on_validation_start = lambda: seen.append(rank_zero_only.rank)
    loader = DataLoader(torch.arange(32.0).view(8, 4), 4)
    strategy = TensorParallelStrategy(None, dp_group=init_device_mesh("cpu", (2,)))
    trainer = fit(module, folder, strategy=strategy, data=loader, steps=1, accumulate_grad_batches=2)
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
    assert said[0].startswith("accumulate_grad_batches=1 on rank 0, and dp_group has 2 ranks")
    assert said[1].startswith("automatic_optimization=False on rank 0 with 2 data parallel ranks is not supported")
    assert "different values of model.weight when training begins" in said[2]
    assert "different values of norms_of.running_mean after a step's forwards" in said[3]
    assert said[4].startswith("the loader ended after 2 of a step's 3 micro-batches on rank 0")
    assert said[5].startswith(
        "the 2 ranks differ in the metric 'own', which is monitored: 0.0 on rank 0; 1.0 on rank 1"
    )
    assert said[6].startswith("training_step logs 'metric', a Metric of torchmetrics, on rank 0")
    assert said[7].startswith("training_step(dataloader_iter) on rank 0 with 2 data parallel ranks")
    assert said[8].startswith("the 2 ranks differ in betas of group 0 of optimizer 0: (0.9, 1.0) on rank 0; (0.9, 0.5)")
    assert said[9].startswith("Trainer(val_check_interval=) of 3600.0 seconds on rank 0 of 2 is not supported")
    assert said[10].startswith("training_step returned None for micro-batch ")
    assert said[11].startswith("LearningRateFinder on rank 0, with 1 tensor parallel and 2 data parallel ranks")
    assert said[12].startswith("the metric 'gradient' is ") and "on the data parallel ranks 0 to 1: a hook" in said[12]
    assert said[13].startswith("an epoch's last step has 1 micro-batches on rank 0, and dp_group has 2 ranks")
