"""Every number that the trainers report is that of the stock tool on one process, by value, at every degree."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import accelerate
import hf_models
import numpy
import pytest
import torch
import transformers
from accelerate import state as accelerate_state
from meshes import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tp_invariant as tpi
from tp_invariant import testing

run_ranks = functools.partial(testing.run_ranks, device="cpu")
DEGREES = ((1, 1), (2, 1), (2, 2), (4, 2))  # ranks, of which data parallel


@pytest.fixture(scope="module", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, 4)


class Rows(Dataset):
    """Examples of different lengths, the last of which has another loss than the others."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, hf_models.VOCABULARY, (count, 8), generator=generator)
        self.ids[-1] = 3
        self.lengths = torch.randint(4, 9, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        visible = torch.arange(8) < self.lengths[index]
        labels = self.ids[index].masked_fill(~visible, -100)
        return dict(input_ids=self.ids[index], attention_mask=visible.long(), labels=labels)


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.rows = Rows(count, seed)

    def __iter__(self) -> Any:
        return iter([self.rows[index] for index in range(len(self.rows))])


class StreamOfLength(Stream):
    def __len__(self) -> int:
        return len(self.rows)


KINDS: dict[str, type] = {"rows": Rows, "stream": Stream, "stream of known length": StreamOfLength}


def groups_of(tp_group: Any, dp: int) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (dp, tp_group.size() // dp), mesh_dim_names=("dp", "tp"))
    return mesh["tp"], mesh["dp"] if dp > 1 else None


def model_of(tp_group: Any, dp: int, library: bool) -> tuple[Any, Any]:
    """The model, and dp_group."""
    model = hf_models.build("llama", num_hidden_layers=1)
    for p in model.parameters():
        p.data.mul_(2.0)  # so that examples differ in their losses
    if not library:
        return model, None
    tp, dp_group = groups_of(tp_group, dp)
    return tpi.parallelize(model, tp), dp_group


def reset() -> None:
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


def same(got: Any, expected: Any, where: str = "", relative: float = 2e-5) -> None:
    """Compares every number in nested containers; times and speeds as the products that do not depend on the clock."""
    if isinstance(expected, dict):
        assert list(got) == list(expected) or set(got) == set(expected), (where, list(got), list(expected))
        for name, value in expected.items():
            if not any(word in str(name) for word in ("runtime", "per_second", "preparation_time")):
                same(got[name], value, f"{where}/{name}", relative)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), (where, len(got), len(expected))
        for index, value in enumerate(expected):
            same(got[index], value, f"{where}/{index}", relative)
    elif isinstance(expected, (torch.Tensor, numpy.ndarray)):
        assert got.shape == expected.shape, (where, got.shape, expected.shape)
        numpy.testing.assert_allclose(numpy.asarray(got), numpy.asarray(expected), 1e-3, 1e-3, err_msg=where)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=relative), where
    else:
        assert got == expected, where


def on_one_process_and_at_every_degree(function: Any, folder: Path, *options: Any) -> tuple[Any, list[list[Any]]]:
    (expected,) = run_ranks(function, 1, 1, False, str(folder / "stock"), *options)
    runs = [run_ranks(function, n, dp, True, str(folder / f"{n} {dp}"), *options) for n, dp in DEGREES]
    return expected, runs


# --- transformers' Trainer ------------------------------------------------------------------------------------------


class Record(transformers.TrainerCallback):
    """What is logged, and what callbacks get of an evaluation."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        self.metrics.append(dict(metrics))


def measures(prediction: Any) -> dict[str, float]:
    losses, inputs = prediction.losses, prediction.inputs
    right = (prediction.predictions.argmax(-1) == prediction.label_ids).mean()
    return {"losses": len(losses), "mean": losses.mean(), "inputs": inputs.sum(), "rows": len(inputs), "right": right}


def by_trainer(tp_group: Any, dp: int, library: bool, folder: str, kind: str, tokens: str) -> dict[str, Any]:
    from tp_invariant.integrations.trainer import Trainer

    model, dp_group = model_of(tp_group, dp, library)
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=9, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, logging_steps=2, logging_first_step=True, optim="adamw_torch", report_to="none",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=3, eval_on_start=True, save_strategy="steps", save_steps=3,
        load_best_model_at_end=True, include_for_metrics=["loss", "inputs"], include_num_input_tokens_seen=tokens,
    )  # fmt: skip
    record, made = Record(), KINDS[kind]
    given = dict(train_dataset=Rows(13) if kind == "rows" else made(40), eval_dataset=made(9, 1))
    options = dict(given, compute_metrics=measures, callbacks=[record])
    try:
        trainer: Any = (
            Trainer(model, arguments, dp_group=dp_group, **options)
            if library
            else transformers.Trainer(model, arguments, **options)
        )
        result = trainer.train()
        samples = result.metrics["train_samples_per_second"] * result.metrics["train_runtime"]
        trainer.args.prediction_loss_only = False
        predicted = trainer.predict(made(9, 1))
        history = json.loads((Path(folder) / "checkpoint-9" / "trainer_state.json").read_text())
        state = {name: value for name, value in history.items() if name not in ("stateful_callbacks", "trial_params")}
        state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
        return {
            "result": result.metrics, "loss": result.training_loss, "samples": round(samples), "logs": record.logs,
            "metrics": record.metrics, "history": state, "evaluation": trainer.evaluate(),
            "prediction": [predicted.metrics, predicted.label_ids, predicted.predictions],
        }  # fmt: skip
    finally:
        reset()


@pytest.mark.parametrize("kind, tokens", [("rows", "all"), ("stream", "non_padding"), ("stream of known length", "no")])
def test_the_trainer(tmp_path, kind, tokens):
    expected, runs = on_one_process_and_at_every_degree(by_trainer, tmp_path, kind, tokens)
    assert expected["evaluation"]["eval_losses"] == expected["evaluation"]["eval_rows"] == 9
    for run in runs:
        for got in run:
            same(got, expected)


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
    dp_group = groups_of(tp_group, dp)[1]
    given = {"model": Sometimes(), "args": arguments, "train_dataset": Rows(20)}
    try:
        trainer: Any = Trainer(**given, dp_group=dp_group) if library else transformers.Trainer(**given)
        return trainer.train().metrics, trainer.state.log_history
    finally:
        reset()


def test_losses_that_are_not_finite(tmp_path):
    (expected,) = run_ranks(with_nan, 1, 1, False, str(tmp_path))
    for ranks in (1, 2):
        for got in run_ranks(with_nan, ranks, ranks, True, str(tmp_path)):
            same(got, expected)


# --- accelerate's own loop ------------------------------------------------------------------------------------------


def accelerator_of(dp_group: Any, library: bool, **options: Any) -> Any:
    if not library:
        return accelerate.Accelerator(cpu=True, **options)
    from tp_invariant.integrations.accelerate import Accelerator

    return Accelerator(cpu=True, dp_group=dp_group, **options)


def by_accelerate(tp_group: Any, dp: int, library: bool, folder: str, kind: str, shared: bool) -> dict[str, Any]:
    """The idiom of transformers' run_clm_no_trainer.py, with everything that may be gathered; and training."""
    model, dp_group = model_of(tp_group, dp, library)
    try:
        accelerator = accelerator_of(dp_group, library, gradient_accumulation_steps=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # ten micro-batches, the last of one example: an epoch's last step has two of them
        loader = DataLoader(Rows(19), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        # four batches, the last of one example, for each data parallel rank the same number
        evaluated = DataLoader(KINDS[kind](10, 1), batch_size=3)
        evaluated = accelerator.prepare_data_loader(evaluated, **({"shared": shared} if library else {}))
        steps, losses = [], []
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    losses.append(loss.item())
                    if accelerator.sync_gradients:
                        steps.append(float(getattr(accelerator, "step_loss", sum(losses) / len(losses))))
                        losses = []
                    optimizer.step()
                    optimizer.zero_grad()
        model.eval()
        gathered: dict[str, list[Any]] = {}
        for batch in evaluated:
            with torch.no_grad():
                loss = model(**batch).loss
            repeated, ids = loss.repeat(3), batch["input_ids"]
            given = {
                "tensor": repeated, "rows": ids, "tuple": (repeated, {"ids": ids}), "scalar": loss,
                "objects": [str(row.tolist()) for row in ids], "as objects": [*ids],
            }  # fmt: skip
            for name, value in given.items():
                found = accelerator.gather_for_metrics(value, use_gather_object=name == "as objects")
                gathered.setdefault(name, []).append(found)
        return {"steps": steps, "gathered": gathered, "state": accelerator.get_state_dict(model)}
    finally:
        reset()


def in_any_order(gathered: dict[str, list[Any]]) -> dict[str, Any]:
    """Of batches that data parallel ranks share, which are gathered in the order of ranks."""
    flat = {name: [x for batch in gathered[name] for x in batch] for name in ("tensor", "objects", "as objects")}
    flat["rows"] = [row for batch in gathered["rows"] for row in batch]
    flat["tuple"] = [row for _, named in gathered["tuple"] for row in named["ids"]]
    numbers = {name: sorted(str(x.tolist()) for x in flat[name]) for name in ("as objects", "rows", "tuple")}
    return {"tensor": sorted(map(float, flat["tensor"])), "objects": sorted(flat["objects"]), **numbers}


@pytest.mark.parametrize(
    "kind, shared", [("rows", False), ("rows", True), ("stream", False), ("stream of known length", False)]
)
def test_accelerates_own_loop(tmp_path, kind, shared):
    expected, runs = on_one_process_and_at_every_degree(by_accelerate, tmp_path, kind, shared)
    assert len(torch.cat(expected["gathered"]["tensor"])) == sum(map(len, expected["gathered"]["objects"])) == 10
    for (_, dp), run in zip(DEGREES, runs, strict=True):
        for got in run:
            if shared and dp > 1:
                got["gathered"] = in_any_order(got["gathered"])
                same(got, {**expected, "gathered": in_any_order(expected["gathered"])})
            else:
                same(got, expected)


# --- Lightning ------------------------------------------------------------------------------------------------------


def by_lightning(tp_group: Any, dp: int, library: bool, folder: str, kind: str) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from tp_invariant.integrations.lightning import TensorParallelStrategy

    model, dp_group = model_of(tp_group, dp, library)
    strategy = TensorParallelStrategy(groups_of(tp_group, dp)[0], dp_group=dp_group) if library else "auto"

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []
            self.steps: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("last", loss)
            self.log("tokens", batch["attention_mask"].sum().float(), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=int(batch["attention_mask"].sum()))
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.steps.append(
                float(self.trainer.strategy.step_loss if library else sum(self.losses) / len(self.losses))
            )
            self.losses = []

        def validation_step(self, batch: Any, index: int) -> None:
            loss = self.model(**batch).loss
            self.log("validation", loss, sync_dist=True)
            self.log_dict({"most": loss, "again": loss}, on_step=True, on_epoch=True, reduce_fx="max")

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test", self.model(**batch).loss)

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            made = torch.optim.AdamW(self.parameters(), lr=1e-3)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=0.5)
            return {"optimizer": made, "lr_scheduler": {"scheduler": plateau, "monitor": "validation"}}

    saving = ModelCheckpoint(folder, "{epoch}", monitor="validation", save_top_k=2)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=4, strategy=strategy, callbacks=[saving],
        logger=CSVLogger(folder, "", ""), log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=2, default_root_dir=folder,
    )  # fmt: skip
    module, evaluated = Module(), DataLoader(KINDS[kind](9, 1), 4)
    trainer.fit(module, DataLoader(Rows(19), 2), evaluated)  # ten micro-batches: an epoch's last step has two of them
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested, predicted = trainer.test(module, evaluated, verbose=False), trainer.predict(module, evaluated)
    torch.distributed.barrier(tp_group)  # rank 0 has written the history
    return {
        "steps": module.steps, "metrics": metrics, "test": tested, "predictions": predicted,
        "history": (Path(folder) / "metrics.csv").read_text(), "best": float(saving.best_model_score),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "kept": {Path(path).name: float(value) for path, value in saving.best_k_models.items()},
    }  # fmt: skip


def of_table(text: str) -> list[list[Any]]:
    head, *rows = [line.split(",") for line in text.splitlines()]
    order = sorted(range(len(head)), key=head.__getitem__)
    return [sorted(head), *([float(row[i]) if row[i] else None for i in order] for row in rows)]


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_lightning(tmp_path, kind):
    expected, runs = on_one_process_and_at_every_degree(by_lightning, tmp_path, kind)
    expected["history"] = of_table(expected["history"])
    for run in runs:
        for got in run:
            got["history"] = of_table(got["history"])
            same(got, expected)
