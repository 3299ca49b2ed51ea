"""What is of accelerate alone: sums over tokens, loaders that draw, triggers, refusals. See test_trainers.py too."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import accelerate
import hf_models
import pytest
import torch
from accelerate import state as accelerate_state
from meshes import init_device_mesh
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainer_runs import reset

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal


def replicas(dp: int) -> Any:
    """dp_group of the first ranks of the pool."""
    return init_device_mesh("cpu", (dp,)) if dp > 1 else None


class Weighted(torch.nn.Module):
    """Two forwards of it in a micro-batch have different masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.last = torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.first(x))).square()


def rows(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12, 1), generator=generator)
    return [{"x": x[i].to(dtype), "items": weights[i]} for i in range(12)]


def by_items(tp_group: Any, dtype: torch.dtype, dp: int, dropout: float) -> Any:
    """Losses and parameters after six steps of four micro-batches, divided by each step's number of items."""
    from tp_invariant.integrations.accelerate import Accelerator

    try:
        model = Weighted().to(dtype)
        model.dropout.p = dropout
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dp_group=replicas(dp))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(5)
        loader = accelerator.prepare(DataLoader(rows(dtype), batch_size=1, shuffle=True))
        seen = []
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = ((model(batch["x"]) + model(batch["x"])) * batch["items"]).sum()
                    accelerator.backward(loss, num_items=batch["items"].sum())
                    if accelerator.sync_gradients:
                        seen.append(accelerator.step_loss.clone())
                    optimizer.step()
                    optimizer.zero_grad()
            assert accelerator.gather(torch.tensor(tp_group.rank())).tolist() == ([0, 1] if dp == 2 else 0)
            whole = [batch["items"] for batch in accelerator.prepare_data_loader(DataLoader(rows(dtype)), shared=False)]
            assert len(whole) == 12
        return seen, {name: p.detach() for name, p in model.named_parameters()}
    finally:
        reset()


def by_hand(tp_group: Any) -> Any:
    """The same by torch alone, in float64, of whole steps without dropout."""
    model, data = Weighted().double().eval(), rows(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    seen = []
    for _ in range(2):
        batches = list(DataLoader(data, batch_size=1, shuffle=True))
        for first in range(0, 12, 4):
            step = batches[first : first + 4]
            items = sum(int(batch["items"].sum()) for batch in step)
            loss = sum((2 * model(batch["x"]) * batch["items"]).sum() for batch in step) / items
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        list(DataLoader(data))  # the loader for evaluation draws a seed
    return seen, {name: p.detach() for name, p in model.named_parameters()}


def test_sums_are_divided_by_the_items_of_a_step_and_dropout_is_the_micro_batchs_own():
    for dropout in (0.0, 0.3):
        (one,) = run_ranks(by_items, 1, torch.float32, 1, dropout)
        for got in run_ranks(by_items, 2, torch.float32, 2, dropout):
            assert_bitwise_equal(got, one)
        if not dropout:
            without = one
            exact = run_ranks(by_hand, 1)[0]
            torch.testing.assert_close([x.double() for x in one[0]], exact[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close({n: p.double() for n, p in one[1].items()}, exact[1], rtol=1e-4, atol=1e-5)
    assert testing.digest(one) != testing.digest(without)


class Noisy(torch.utils.data.Dataset):
    """Rows that it draws, by a generator of its own, too."""

    def __init__(self) -> None:
        self.generator, self.level = torch.Generator().manual_seed(3), 1.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.level * (torch.rand(8) + torch.rand(8, generator=self.generator) + index)


class Masked:
    """A collate_fn that draws, and counts its batches."""

    batches = 0

    def __call__(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        x = torch.stack(batch)
        return x * (torch.rand_like(x) < 0.7) + self.batches


def with_drawn_batches(tp_group: Any, dp: int, kind: str = "group", workers: int = 0) -> Any:
    """Losses of two epochs, the first of which is gone on with after its first step; and what ranks gather."""
    from tp_invariant.integrations.accelerate import Accelerator

    dp_group = replicas(dp)
    try:
        model = Weighted()
        if kind == "fully":
            fully_shard(model, mesh=dp_group)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dp_group=dp_group)
        torch.manual_seed(5)
        loader = DataLoader(Noisy(), batch_size=1, shuffle=True, collate_fn=Masked(), num_workers=workers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen, rows, gathered = [], [], []
        for batches in (loader, accelerator.skip_first_batches(loader, 4 // dp)):
            loader.dataset.level += 1.0
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(batch).mean()
                    accelerator.backward(loss)
                    rows.append(batch)
                    gathered.append(accelerator.gather_for_metrics(loss.detach()[None]))
                    if accelerator.sync_gradients:
                        seen.append(accelerator.step_loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return seen, rows, torch.cat(gathered).sort().values
    finally:
        reset()


def test_what_a_dataset_and_a_collator_draw_is_that_of_one_process():
    for workers, kind in ((0, "fully"), (1, "group")):
        ((losses, rows, gathered),) = run_ranks(with_drawn_batches, 1, 1, "group", workers)
        assert len(losses) == 5 and len({testing.digest(row) for row in rows}) == 20, "each is drawn anew"
        assert len(gathered) == 20
        for got in run_ranks(with_drawn_batches, 2, 2, kind, workers):
            assert_bitwise_equal((got[0], got[2]), (losses, gathered))


def shared_and_gathered(tp_group: Any, dp: int) -> dict[str, list[Any]]:
    """What is gathered of a shared loader's batches, the last of which has one row."""
    from tp_invariant.integrations.accelerate import Accelerator

    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dp_group=replicas(dp))
        loader = accelerator.prepare(DataLoader(torch.arange(10.0), 3))
        gathered: dict[str, list[Any]] = {"rows": [], "repeated": [], "objects": []}
        for batch in loader:
            gathered["rows"] += accelerator.gather_for_metrics(batch).tolist()
            gathered["repeated"] += accelerator.gather_for_metrics((batch.mean().repeat(3), batch))[0].tolist()
            gathered["objects"] += accelerator.gather_for_metrics([str(x) for x in batch.tolist()])
        return {name: sorted(values) for name, values in gathered.items()}
    finally:
        reset()


def test_a_short_last_batch_of_a_shared_loader():
    (one,) = run_ranks(shared_and_gathered, 1, 1)
    assert len(one["rows"]) == len(one["repeated"]) == len(one["objects"]) == 10
    assert run_ranks(shared_and_gathered, 2, 2) == [one] * 2


def saved(tp_group: Any, folder: Any) -> bool:
    """Whether what get_state_dict returns, and what save_model writes, is the whole model."""
    from tp_invariant.integrations.accelerate import Accelerator

    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    before = {name: p.clone() for name, p in whole.state_dict().items()}
    try:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(tpi.parallelize(whole, tp_group, {"0": "colwise", "1": "rowwise"}))
        own = folder / str(tp_group.rank())
        accelerator.save_model(model, own)
        written = load_file(own / "model.safetensors")
        return testing.digest([accelerator.get_state_dict(model), written]) == testing.digest([before, before])
    finally:
        reset()


def saved_of_tied(tp_group: Any, folder: Any) -> list[tuple[list[str], list[str], bool]]:
    """The keys of get_state_dict and of save_model's file, and whether tied weights are one tensor; then the same of
    accelerate itself, on one process."""
    from tp_invariant.integrations.accelerate import Accelerator

    found = []
    for kind in (Accelerator, accelerate.Accelerator):
        try:
            accelerator, model = kind(cpu=True), hf_models.build("llama", tie_word_embeddings=True, num_hidden_layers=1)
            if kind is Accelerator:
                model = accelerator.prepare(tpi.parallelize(model, tp_group))
            own = folder / f"{kind.__module__} {tp_group.rank()}"
            accelerator.save_model(model, own)
            whole = accelerator.get_state_dict(model)
            tied = whole["lm_head.weight"].data_ptr() == whole["model.embed_tokens.weight"].data_ptr()
            written = load_file(own / "model.safetensors") if kind is Accelerator or tp_group.rank() == 0 else {}
            found.append((sorted(whole), sorted(written), tied))
        finally:
            reset()
    return found


def test_tied_weights_are_written_once_as_by_accelerate(tmp_path):
    for ranks in (1, 2):
        ours, theirs = run_ranks(saved_of_tied, ranks, tmp_path / str(ranks))[0]
        assert ours == theirs
        assert ours[2] and len(ours[1]) == len(ours[0]) - 1


def test_state_dicts_and_files_are_of_the_whole_model(tmp_path):
    for ranks in (1, 2):
        assert run_ranks(saved, ranks, tmp_path) == [True] * ranks


# --- what is refused ------------------------------------------------------------------------------------------------


def refusals(tp_group: Any) -> dict[str, str]:
    from tp_invariant.integrations.accelerate import Accelerator

    said = {}

    def refused(name: str, error: type[Exception], call: Any) -> None:
        try:
            with pytest.raises(error) as caught:
                call()
            said[name] = str(caught.value)
        finally:
            reset()

    def model() -> Any:
        return tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group)

    def step_with_other_batches() -> None:
        prepared = Accelerator(cpu=True).prepare(model())
        prepared(torch.full((1, 8), 3.0 + tp_group.rank()))

    refused(
        "split",
        ValueError,
        lambda: Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True)),
    )
    refused("compile", ValueError, lambda: Accelerator(cpu=True, dynamo_backend="eager"))
    refused("state", ValueError, lambda: Accelerator(cpu=True).save_state("folder"))
    refused("optimizer", TypeError, lambda: Accelerator(cpu=True).prepare(torch.optim.Adafactor(model().parameters())))
    refused("batches", ValueError, step_with_other_batches)
    rank = str(tp_group.rank())
    started = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(torch.distributed.get_world_size()), LOCAL_WORLD_SIZE="2")
    with mock.patch.dict(os.environ, started):
        part = torch.nn.Linear(8, 8)
        refused("part of the job", ValueError, lambda: Accelerator(cpu=True).prepare(part))
    return said


def test_what_is_refused():
    said = run_ranks(refusals, 2)[0]
    assert said["split"].startswith("split_batches=True")
    assert said["compile"].startswith("torch.compile by accelerate is not supported")
    assert "tp_invariant.checkpoint.save" in said["state"]
    assert said["optimizer"].startswith("Adafactor of a shard")
    assert said["batches"].startswith("the 2 ranks differ in the batches of a step")
    assert "ranks, the model is sharded over 1, and dp_group has 1: give dp_group" in said["part of the job"]


def refusals_of_data_parallel_ranks(tp_group: Any) -> dict[str, str]:
    from accelerate.utils import GradientAccumulationPlugin

    from tp_invariant.integrations.accelerate import Accelerator

    dp_group, rank = replicas(2), torch.distributed.get_rank()
    said = {}

    def made(steps: int = 4, **options: Any) -> Any:
        return Accelerator(cpu=True, gradient_accumulation_steps=steps, dp_group=dp_group, **options)

    def refused(name: str, call: Any, error: type[Exception] = ValueError) -> None:
        try:
            with pytest.raises(error) as caught:
                call()
            said[name] = str(caught.value)
        finally:
            reset()

    def begin(accelerator: Any, seed: int = 0, order: int = 0, batches: int = 2, norm: bool = False) -> Any:
        torch.manual_seed(seed)
        last = torch.nn.BatchNorm1d(4) if norm else torch.nn.Linear(4, 4)
        model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), last))
        generator = torch.Generator().manual_seed(order)
        data = torch.arange(32.0).view(8, 4)
        loader = accelerator.prepare(DataLoader(data, batches, shuffle=True, generator=generator))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
        return accelerator, loader

    def twice() -> None:
        accelerator = made()
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).sum())

    def not_zeroed() -> None:
        accelerator = made(2)
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).sum())
                optimizer.step()

    def scheduled_by_its_own_loss() -> None:
        accelerator = made(2)
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.param_groups[0]["lr"] = 0.5**rank
        accelerator.backward(model(torch.ones(2, 4)).sum())

    def skip() -> None:
        accelerator, loader = begin(made())
        accelerator.skip_first_batches(loader, 1)

    def save_inside() -> None:
        accelerator = made()
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
        accelerator.save_state("folder")

    def some_fully_sharded() -> None:
        accelerator = made()
        accelerator.prepare(torch.nn.Linear(4, 4))
        accelerator.prepare(fully_shard(torch.nn.Linear(4, 4), mesh=dp_group))

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(torch.ones(8, 4))

    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    refused("steps", lambda: made(3))
    refused("plugin", lambda: Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dp_group=dp_group))
    refused("odd", lambda: begin(made(), batches=3))
    refused("length", lambda: made().prepare(DataLoader(Endless(), 2)))
    refused("replicas", lambda: begin(made(), seed=rank))
    refused("buffers", lambda: begin(made(), norm=True))
    refused("order", lambda: begin(made(), order=rank))
    refused("outside", twice, RuntimeError)
    refused("not zeroed", not_zeroed, RuntimeError)
    refused("schedule", scheduled_by_its_own_loss)
    refused("skip", skip)
    refused("save", save_inside)
    refused("some", some_fully_sharded)
    return said


def test_what_is_refused_of_data_parallel_ranks():
    said = run_ranks(refusals_of_data_parallel_ranks, 2)[0]
    assert said["steps"].startswith("gradient_accumulation_steps=3 on rank 0 of dp_group, which has 2 ranks")
    assert said["plugin"].startswith("sync_with_dataloader=False")
    assert said["odd"].startswith("an epoch's last step has 3 batches on rank 0 of dp_group")
    assert said["length"].startswith("a loader of Endless on rank 0 of dp_group has no known length")
    assert "different values of 0.weight when training begins" in said["replicas"]
    assert "different values of 1.running_mean after a step's forwards" in said["buffers"]
    assert said["order"].startswith("the 2 ranks differ in the batches of a step")
    assert said["outside"].startswith("backward was called 1 times on rank 0 when the optimizer's step is due")
    assert said["not zeroed"].startswith("a step begins on rank 0 of dp_group, and parameters of an optimizer have")
    assert said["schedule"].startswith("the 2 ranks differ in lr of group 0 of optimizer 0: 1.0 on rank 0; 0.5 on rank")
    assert said["skip"].startswith("num_batches=1 on rank 0 of dp_group: with data parallel ranks skip whole steps")
    assert said["save"].startswith("save_state('folder') was called inside of a step")
    assert said["some"].startswith("fully_shard has sharded some of the prepared models and not others, on rank 0")


def as_a_launcher_says(tp_group: Any) -> tuple[float, bool, list[int]]:
    """With accelerate told of all ranks, as torchrun does: a schedule's rate, a trigger of rank 0, a split."""
    from tp_invariant.integrations.accelerate import Accelerator

    try:
        accelerator = Accelerator(cpu=True)
        for state in (accelerate_state.PartialState, accelerate_state.AcceleratorState):
            state._shared_state["num_processes"] = tp_group.size()
        model = tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for _ in range(2):
            optimizer.step()
            schedule.step()
        if tp_group.rank() == 0:
            accelerator.set_trigger()
        seen = accelerator.check_trigger()
        assert not accelerator.check_trigger()
        with accelerator.split_between_processes([0, 1, 2, 3]) as mine:
            return schedule.get_last_lr()[0], seen, mine
    finally:
        reset()


def test_schedules_triggers_and_splits_are_those_of_one_process():
    for degree in (1, 2):
        assert run_ranks(as_a_launcher_says, degree) == [(0.25, True, [0, 1, 2, 3])] * degree
