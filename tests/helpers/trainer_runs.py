"""One model and its data, trained by each tool: with this library's integration, or by the tool itself on one process.

`run(tp_group, tool, case, folder)` returns the loss, norm and rate of each step, everything that the tool reports, and
the parameters in the end.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import accelerate
import hf_models
import numpy
import pytest
import torch
import transformers
from accelerate import state as accelerate_state
from meshes import init_device_mesh, mesh_or_group, shard_fully
from ranks import run_ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tp_invariant as tpi
from tp_invariant import testing

TOOLS = ("trainer", "accelerate", "lightning")
SAVED = 4  # the step whose checkpoint runs go on from


class Rows(Dataset):
    """Examples of different lengths, so that micro-batches differ in their numbers of tokens. The last has another loss
    than the others."""

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


KINDS: dict[str, Any] = {"rows": Rows, "stream": Stream, "stream of known length": StreamOfLength}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run. A step has four micro-batches; by default an epoch has three steps, the last of two micro-batches, whose
    second one has one example."""

    library: bool = True
    dp: int = 1
    shards: str = "mesh"  # "group", "mesh", or "fully": a mesh, and fully_shard
    mode: bool = True
    dtype: torch.dtype = torch.float32
    rows: int = 19
    batch: int = 2
    steps: int = 6
    evaluated: str = "rows"
    autocast: bool = False
    workers: int = 0
    experts: bool = False  # a mixture, whose experts are divided over all ranks
    lora: bool = False
    draws: bool = False  # dropout, and a collate_fn that draws
    resume: str = ""  # the folder of a run to go on from


def parallel(tp_group: Any, case: Case) -> tuple[Any, Any, Any]:
    """The model, what its layers are sharded over, and dp_group."""
    model = hf_models.build("mixtral" if case.experts else "llama", case.dtype, num_hidden_layers=1)
    for p in model.parameters():
        p.data.mul_(2.0)  # so that examples differ in their losses
    kind, tp, dp_group = "group" if case.shards == "group" else "mesh", None, None
    if case.library:
        tp = mesh_or_group(tp_group, kind)
        if case.dp > 1:
            mesh = init_device_mesh("cpu", (case.dp, tp_group.size() // case.dp), mesh_dim_names=("dp", "tp"))
            tp, dp_group = mesh["tp"].get_group() if kind == "group" else mesh["tp"], mesh["dp"]
        experts = mesh_or_group(tp_group, kind) if case.experts else None
        model = tpi.parallelize(model, tp, expert_parallel_group=experts)
    if case.lora:
        model = with_lora(model, case.library)
    if case.draws:
        model.register_forward_hook(drop_losses)
    if case.shards == "fully":
        shard_fully(model, dp_group, reshard=case.dp < 4)
    return model, tp, dp_group


def with_lora(model: Any, library: bool = True, dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    from tp_invariant.integrations.peft import register

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
    return get_peft_model(model, register(config) if library else config)


def drop_losses(module: Any, args: Any, output: Any) -> None:
    output.loss = torch.nn.functional.dropout(output.loss[None], 0.4, module.training).sum()


def drawing(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collate_fn that draws."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    ids = batch["input_ids"]
    return {**batch, "input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.2, 3)}


def reset() -> None:
    """What accelerate keeps for the whole process."""
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_state.GradientState._reset_state()


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


class Between(transformers.TrainerCallback):
    """A collective over the data parallel ranks between micro-batches, as a callback of a user's may have."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        mesh = getattr(next(model.parameters()), "device_mesh", None)
        if mesh is not None:
            torch.distributed.all_reduce(torch.zeros(1), group=mesh.get_group(0))


def measures(prediction: Any) -> dict[str, float]:
    losses, inputs = prediction.losses, prediction.inputs
    right = (prediction.predictions.argmax(-1) == prediction.label_ids).mean()
    return {"losses": len(losses), "mean": losses.mean(), "inputs": inputs.sum(), "rows": len(inputs), "right": right}


def arguments(folder: Any, **options: Any) -> transformers.TrainingArguments:
    given: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        learning_rate=1e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, optim="adamw_torch",
    )  # fmt: skip
    return transformers.TrainingArguments(**{**given, **options})


def by_trainer(tp_group: Any, case: Case, folder: str, model: Any, tp: Any, dp_group: Any) -> dict[str, Any]:
    from tp_invariant.integrations.trainer import DigestLogCallback, Trainer

    given = arguments(
        folder, max_steps=case.steps, per_device_train_batch_size=case.batch, logging_steps=2, logging_first_step=True,
        per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=2, eval_on_start=True, save_strategy="steps",
        save_steps=2, load_best_model_at_end=True, include_for_metrics=["loss", "inputs"], bf16=case.autocast,
        include_num_input_tokens_seen="non_padding", dataloader_num_workers=case.workers,
        gradient_checkpointing=case.autocast,
    )  # fmt: skip
    record = Record()
    callbacks: list[Any] = [record, *([Between()] if case.shards == "fully" else [])]
    if case.library and case.shards != "fully" and not case.experts:
        callbacks.append(DigestLogCallback(f"{folder}/digests.log"))
    evaluated = KINDS[case.evaluated]
    options: dict[str, Any] = dict(
        args=given, train_dataset=Rows(case.rows), eval_dataset=evaluated(9, 1), compute_metrics=measures,
        callbacks=callbacks, data_collator=drawing if case.draws else None,
    )  # fmt: skip
    trainer: Any = (
        Trainer(model, dp_group=dp_group, **options) if case.library else transformers.Trainer(model, **options)
    )
    result = trainer.train(resume_from_checkpoint=f"{case.resume}/checkpoint-{SAVED}" if case.resume else None)
    predicted = trainer.predict(evaluated(9, 1))
    state = json.loads((Path(folder) / f"checkpoint-{case.steps}" / "trainer_state.json").read_text())
    state = {name: value for name, value in state.items() if name != "stateful_callbacks"}
    state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
    visible = predicted.predictions[predicted.label_ids != -100]
    samples = result.metrics["train_samples_per_second"] * result.metrics["train_runtime"]
    return {
        "steps": [[log["loss"], log["grad_norm"], log["learning_rate"]] for log in record.logs if "grad_norm" in log],
        "result": result.metrics, "samples": round(samples), "logs": record.logs, "metrics": record.metrics,
        "history": state, "evaluation": trainer.evaluate(),
        "prediction": [predicted.metrics, predicted.label_ids, visible],
    }  # fmt: skip


# --- accelerate's own loop ------------------------------------------------------------------------------------------


def by_accelerate(tp_group: Any, case: Case, folder: str, model: Any, tp: Any, dp_group: Any) -> dict[str, Any]:
    """The idiom of transformers' run_clm_no_trainer.py, with everything that may be gathered."""
    from tp_invariant.integrations.accelerate import Accelerator

    seedable = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    options: dict[str, Any] = dict(
        cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16" if case.autocast else "no",
        dataloader_config=seedable,
    )  # fmt: skip
    made: Any = Accelerator(**options, dp_group=dp_group) if case.library else accelerate.Accelerator(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(
        Rows(case.rows), case.batch, shuffle=True, collate_fn=drawing if case.draws else None, num_workers=case.workers
    )
    model, optimizer, loader, schedule = made.prepare(model, optimizer, loader, schedule)
    evaluated = DataLoader(KINDS[case.evaluated](9, 1), 4)
    evaluated = made.prepare_data_loader(evaluated, **({"shared": False} if case.library else {}))
    steps: list[list[float]] = []
    losses: list[float] = []
    epoch = 1 if case.resume else 0
    if case.resume:
        made.load_state(f"{case.resume}/state")
    # SAVED is one step after the first epoch of three steps
    batches = made.skip_first_batches(loader, 4 // case.dp) if case.resume else loader
    missing = case.steps - SAVED if case.resume else case.steps
    while len(steps) < missing:
        loader.set_epoch(epoch)
        model.train()
        for batch in batches:
            with made.accumulate(model):
                loss = model(**batch).loss
                made.backward(loss)
                losses.append(loss.item())
                if made.sync_gradients:
                    norm = made.clip_grad_norm_(model.parameters(), 1.0)
                    mean = getattr(made, "step_loss", None)
                    mean = sum(losses) / len(losses) if mean is None else mean
                    steps.append([float(mean), float(norm), schedule.get_last_lr()[0]])
                    losses = []
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if case.library and not case.resume and made.sync_gradients and len(steps) == SAVED:
                made.save_state(f"{folder}/state")
            if len(steps) == missing:
                break
        epoch, batches = epoch + 1, loader
    model.eval()
    gathered: dict[str, list[Any]] = {}
    for batch in evaluated:
        with torch.no_grad():
            loss = model(**batch).loss
        repeated, ids = loss.repeat(4), batch["input_ids"]
        given = {
            "tensor": repeated, "rows": ids, "nested": (repeated, {"ids": ids}), "scalar": loss,
            "objects": [str(row.tolist()) for row in ids], "as objects": [*ids],
        }  # fmt: skip
        for name, value in given.items():
            gathered.setdefault(name, []).append(made.gather_for_metrics(value, use_gather_object=name == "as objects"))
    assert len(torch.cat(gathered["tensor"])) == sum(map(len, gathered["objects"])) == 9
    return {"steps": steps, "gathered": gathered, "state": made.get_state_dict(model)}


# --- Lightning ------------------------------------------------------------------------------------------------------


def module_of(model: Any, library: bool = True) -> Any:
    """A LightningModule that logs in each of the ways that there are."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []
            self.steps: list[list[float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("last", loss)
            self.log("tokens", batch["attention_mask"].sum().float(), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=int(batch["attention_mask"].sum()))
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            mean = self.trainer.strategy.step_loss if library else sum(self.losses) / len(self.losses)
            norm = tpi.clip_grad_norm_(self.parameters(), float("inf"))
            self.steps.append([float(mean), float(norm), optimizer.param_groups[0]["lr"]])
            self.losses = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.model(**batch).loss
            self.log("validation", loss, sync_dist=True)
            self.log_dict({"most": loss, "again": loss}, on_step=True, on_epoch=True, reduce_fx="max")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.model(**batch).loss)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            made = torch.optim.AdamW(self.parameters(), lr=1e-3)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=0.5)
            return {"optimizer": made, "lr_scheduler": {"scheduler": plateau, "monitor": "validation"}}

    return Module()


def fit(module: Any, folder: Any, data: Any, validation: Any = None, resume: Any = None, **options: Any) -> Any:
    import lightning

    given: dict[str, Any] = dict(
        accelerator="cpu", devices=1, accumulate_grad_batches=4, gradient_clip_val=1.0, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few workers, and so on
        trainer = lightning.Trainer(**{**given, **options})
        trainer.fit(module, data, validation, ckpt_path=resume, weights_only=False)
    return trainer


def by_lightning(tp_group: Any, case: Case, folder: str, model: Any, tp: Any, dp_group: Any) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from tp_invariant.integrations.lightning import TensorParallelStrategy

    lightning.seed_everything(7, workers=True, verbose=False)
    best = ModelCheckpoint(folder, "{epoch}", monitor="validation", save_top_k=2)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    module, evaluated = module_of(model, case.library), DataLoader(KINDS[case.evaluated](9, 1), 4)
    data = DataLoader(
        Rows(case.rows), case.batch, shuffle=True, collate_fn=drawing if case.draws else None, num_workers=case.workers
    )
    trainer = fit(
        module, folder, data, evaluated, resume=f"{case.resume}/step={SAVED}.ckpt" if case.resume else None,
        max_steps=case.steps, strategy=TensorParallelStrategy(tp, dp_group=dp_group) if case.library else "auto",
        callbacks=[best, saving], enable_checkpointing=True, logger=CSVLogger(folder, "", ""),
        precision="bf16-mixed" if case.autocast else None,
    )  # fmt: skip
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested, predicted = trainer.test(module, evaluated, verbose=False), trainer.predict(module, evaluated)
    torch.distributed.barrier(tp_group)  # rank 0 has written the history
    head, *rows = [line.split(",") for line in (Path(folder) / "metrics.csv").read_text().splitlines()]
    order = sorted(range(len(head)), key=head.__getitem__)
    return {
        "steps": module.steps, "metrics": metrics, "test": tested, "predictions": predicted,
        "history": [sorted(head), *([float(row[i]) if row[i] else None for i in order] for row in rows)],
        "kept": {Path(path).name: float(value) for path, value in best.best_k_models.items()},
    }  # fmt: skip


# --- all of them ----------------------------------------------------------------------------------------------------

_RUNS = {"trainer": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}


def run(tp_group: Any, tool: str, case: Case, folder: str) -> dict[str, Any]:
    try:
        with tpi.set_tp_invariant_mode(case.mode):
            model, tp, dp_group = parallel(tp_group, case)
            torch.manual_seed(7)
            reported = without_times(_RUNS[tool](tp_group, case, folder, model, tp, dp_group))
            named = testing.full_parameters(model) if case.library else dict(model.named_parameters())
        return {**reported, "parameters": {name: p.detach() for name, p in named.items()}}
    finally:
        reset()


def run_case(ranks: int, tool: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """`run` on the first ranks of the pool."""
    folder.mkdir(parents=True, exist_ok=True)
    return run_ranks(run, ranks, tool, Case(**options), str(folder), timeout=300.0)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        clock = ("runtime", "per_second", "preparation_time")
        return {name: without_times(x) for name, x in value.items() if not any(word in str(name) for word in clock)}
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return torch.as_tensor(value)
    return [without_times(x) for x in value] if isinstance(value, (list, tuple)) else value


def same(got: Any, expected: Any, where: str = "", relative: float = 1e-4) -> None:
    """Compares every number in nested containers."""
    if isinstance(expected, dict):
        assert set(got) == set(expected), (where, list(got), list(expected))
        for name, value in expected.items():
            same(got[name], value, f"{where}/{name}", relative)
    elif isinstance(expected, list):
        assert len(got) == len(expected), (where, len(got), len(expected))
        for index, value in enumerate(expected):
            same(got[index], value, f"{where}/{index}", relative)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=relative), where
    else:
        assert got == expected, where
