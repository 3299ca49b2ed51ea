"""Lightning for models of this library's: a strategy that wraps nothing, for tensor and data parallel ranks.

    module = MyLightningModule(tpi.parallelize(model, mesh["tp"]))
    strategy = tp_invariant.integrations.lightning.TensorParallelStrategy(mesh["tp"], dp_group=mesh["dp"])
    trainer = lightning.Trainer(strategy=strategy, devices=1, gradient_clip_val=1.0, accumulate_grad_batches=4)
    trainer.fit(module, loader)

`devices=1` is this rank's device. Every rank counts as the one process of its run, and rank 0 alone logs and writes:

    batches        are read by every rank: loaders get no DistributedSampler, their workers the same seeds
    a step         has accumulate_grad_batches micro-batches at every degree, which data parallel ranks share: each
                   calls training_step for those of its share, and a MicroBatchTree sums the gradients
    logging        in training_step is Lightning's own; where data parallel ranks share a step it is done when the step
                   ends, of all its micro-batches in their order, on every rank, so that metrics are those of one
                   process. `strategy.step_loss` is the last step's loss
    random numbers in training_step (dropout) depend on the first seed, the step and the micro-batch alone
    evaluation     is of the whole set on every data parallel rank
    clipping       is tp_invariant.clip_grad_norm_
    checkpoints    are those that Lightning writes of the whole model on one process; any degree goes on from them
    decisions      of callbacks by a clock, and the names of files, are rank 0's

A resumed run has the same bits at every degree. It need not have those of a run that was not stopped: Lightning's
checkpoints hold no states of random generators, and with which batches a run goes on is up to Lightning.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from ..checkpoint.full_optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from ..checkpoint.full_state import full_state_dict, load_full_state_dict
from ..comm.collectives import ranks_of, resolve_group
from ..comm.wire import gather_objects
from ..layers.grad_norm import clip_grad_norm_
from ..optim import check
from .training import GroupOrMesh, Ranks, Step, dp_ranks, seed_workers_alike, seeded

_rank_zero_only: Any = rank_zero.rank_zero_only  # its attribute `rank` says who logs
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class TensorParallelStrategy(SingleDeviceStrategy):
    """See this file's head.

    Args:
        tp_group: a ProcessGroup or 1-D DeviceMesh, that of the model; None is TP=1.
        dp_group: the same, of the ranks that hold the same shards, or parts of them by fully_shard, called before the
            Trainer gets the module; None: there is one of each.
        device: of this rank; None for the current one of CUDA where tp_group is NCCL's, else the CPU.

    Raises:
        ValueError: groups with less ranks than the job has by WORLD_SIZE, which torchrun sets. When training begins: a
            precision other than 32-true, bf16-mixed and bf16-true; a model that is sharded over another group, or
            groups or a fully_shard that do not fit the job (`Ranks`); ranks whose batches or optimizers'
            hyperparameters differ; fewer micro-batches than data parallel ranks, or, of fully_shard, no multiple of
            them; data parallel ranks with different parameters or buffers, manual optimization, a training_step that
            takes dataloader_iter or logs a Metric of torchmetrics; a training_step that returns None; what
            `tp_invariant.optim.check` refuses.
    """

    strategy_name = "tp_invariant"

    def __init__(
        self,
        tp_group: GroupOrMesh,
        device: torch.device | str | None = None,
        *,
        dp_group: GroupOrMesh = None,
        **others: Any,
    ) -> None:
        self.group = resolve_group(tp_group)
        self.dp = dp_ranks(dp_group)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started not in (1, self.group.size * self.dp.size):
            raise ValueError(
                f"the job has {started} ranks, tp_group has {self.group.size}, and dp_group {self.dp.size}: give "
                "dp_group, the ranks that hold the same shards as this one"
            )
        if device is None:
            nccl = self.group.process_group is not None and dist.get_backend(self.group.process_group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"
        super().__init__(device, **others)
        self.global_rank = self.dp.rank * self.group.size + self.group.rank
        self.step_loss: torch.Tensor | None = None  # of the last step
        self._ranks: Ranks | None = None
        self._current_step: Step | None = None
        self._seen = 0  # of the current step's micro-batches
        self._steps = 0  # before the current one
        self._seed = 0
        self._stops = False  # whether trainer.should_stop was set inside of the step
        self._logged: list[tuple[int, tuple, dict[str, Any]]] = []  # micro-batch, and what log was called with
        self._rank_before = getattr(_rank_zero_only, "rank", 0)

    def set_world_ranks(self) -> None:
        """Lightning calls this when its Trainer is made: from now on rank 0 alone logs."""
        _rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """And this when the Trainer begins: a second time it does so after a teardown."""
        self.set_world_ranks()
        super().setup_environment()

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *args: Any, **options: Any) -> None:
        self._gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._gather(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """A callback's decision, which on data parallel ranks is by the metrics of their own micro-batches."""
        everyone = self._gather(bool(decision))
        return len(everyone) == sum(everyone) if all else any(everyone)

    def _gather(self, own: Any) -> list[Any]:
        return [value for row in gather_objects(gather_objects(own, self.group), self.dp) for value in row]

    # --- before training --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        module: Any = self._module()
        self._ranks = Ranks(module, self.dp)
        self._current_step = None
        self._seed = self._ranks.gather(torch.initial_seed())[0]
        if self._ranks.tp.size * self.group.size > 1 and ranks_of(self._ranks.tp) != ranks_of(self.group):
            raise ValueError(
                f"the model is sharded over the ranks {ranks_of(self._ranks.tp)}, and the strategy's tp_group has "
                f"{ranks_of(self.group)}: give parallelize and TensorParallelStrategy the same group"
            )
        self._check_settings(module)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = _not_distributed  # each rank's has seen all that one process' has
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = functools.partial(_clip_by_norm, plugin)
        super().setup(trainer)

    def _check_settings(self, module: Any) -> None:
        """Raises: ValueError: see the class."""
        refused = []
        if self.precision_plugin.precision not in _PRECISIONS:
            refused.append((f"Trainer(precision={self.precision_plugin.precision!r})", f"choose one of {_PRECISIONS}"))
        if self.dp.size > 1 and not module.automatic_optimization:
            refused.append(("automatic_optimization=False", "write the loop with data_parallel.MicroBatchTree"))
        if self.dp.size > 1 and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            refused.append(("training_step(dataloader_iter)", "every rank reads every batch: let it take the batch"))
        for what, advice in refused:
            raise ValueError(
                f"{what} on rank {self.global_rank}, with {self.group.size} tensor parallel and {self.dp.size} data "
                f"parallel ranks, is not supported: {advice}"
            )

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check(getattr(optimizer, "_optimizer", optimizer))

    def process_dataloader(self, dataloader: Any) -> Any:
        seed_workers_alike(dataloader)
        return dataloader

    # --- a step -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **options: Any) -> Any:
        """The module's own; None, which Lightning leaves out, for a micro-batch of another data parallel rank."""
        module, ranks = self._module(), self._ranks
        assert ranks is not None
        if not module.automatic_optimization:
            if self._current_step is None:
                self._current_step = Step(ranks, [module])
                self._compare(ranks, args, options)
            return super().training_step(*args, **options)
        step, index = self._current(ranks)
        if index == 0:
            self._compare(ranks, args, options)
            self._logged = []
        self._seen = index + 1
        due, output = step.due(index, (args, options)), None
        if due is not None:
            number, (args, options) = due
            place = self._seed, self._steps, number
            with self._log_kept(number, [*args, *options.values()][0]), seeded(place, self.root_device):
                output = super().training_step(*args, **options)
            if output is None and step.micro_batches > 1:
                raise ValueError(
                    f"training_step returned None for micro-batch {number} of a step on rank {self.global_rank}: a "
                    f"step has {step.micro_batches} of them at every degree; return a loss for each, perhaps times 0"
                )
        if self.dp.size > 1:
            trainer: Any = module.trainer
            self._stops, trainer.should_stop = self._stops or trainer.should_stop, False
            if self.ends_step:
                self._log_in_order()
        return output

    def _compare(self, ranks: Ranks, args: Any, options: Any) -> None:
        ranks.check_batches([args, options])
        ranks.check_hyperparameters(self.optimizers)

    @contextlib.contextmanager
    def _log_kept(self, number: int, batch: Any) -> Iterator[None]:
        """Inside, the module's `log` keeps its arguments for `_log_in_order`, if data parallel ranks share a step."""
        module: Any = self._module()
        if self.dp.size == 1:
            yield
            return
        signature = inspect.signature(LightningModule.log)

        def log_later(*args: Any, **options: Any) -> None:
            given = signature.bind(module, *args, **options).arguments
            value, reduction = given["value"], given.get("reduce_fx", "mean")
            if isinstance(value, Metric):
                raise ValueError(
                    f"training_step logs {given['name']!r}, a Metric of torchmetrics, on rank {self.global_rank}: with "
                    f"{self.dp.size} data parallel ranks it has seen this rank's micro-batches alone. Log a tensor, or "
                    "the Metric in validation_step, which sees the same on every rank"
                )
            copy = value.detach().clone() if isinstance(value, Tensor) else value  # the module may go on with it
            args, options = (args[0], copy, *args[2:]) if len(args) > 1 else args, dict(options)
            if len(args) < 2:
                options["value"] = copy
            options.pop("sync_dist_group", None)
            if given.get("on_epoch") and (reduction is torch.mean or str(reduction).lower() in ("mean", "avg")):
                options["batch_size"] = given.get("batch_size") or extract_batch_size(batch)
            self._logged.append((number, args, options))

        own = vars(module).get("log")
        module.log = log_later
        try:
            yield
        finally:
            del module.log
            if own is not None:
                module.log = own

    def _log_in_order(self) -> None:
        """Logs what the step's micro-batches have logged on any data parallel rank, as one process. A collective."""
        module: Any = self._module()
        own = [
            (number, tuple(_moved(value, "cpu") for value in args), {k: _moved(v, "cpu") for k, v in options.items()})
            for number, args, options in self._logged
        ]
        everyone = gather_objects((own, self._stops), self.dp)
        # set by the module for a micro-batch of one rank: all go on to the step's end
        self._stops, module.trainer.should_stop = False, any(stops for _, stops in everyone)
        logged = itertools.chain.from_iterable(logged for logged, _ in everyone)
        for _, args, options in sorted(logged, key=lambda numbered: numbered[0]):
            args = tuple(_moved(value, self.root_device) for value in args)
            module.log(*args, **{name: _moved(value, self.root_device) for name, value in options.items()})

    @property
    def ends_step(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        return self._current_step is not None and self._seen == self._current_step.micro_batches

    def _current(self, ranks: Ranks) -> tuple[Step, int]:
        """The current step, which its first micro-batch starts, and the micro-batch's index in it."""
        trainer: Any = self._module().trainer
        steps, before = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        if self._current_step is None:
            self._current_step = Step(ranks, [self._module()])
        if before % steps == 0:
            ranks.check_accumulation("accumulate_grad_batches", steps)
            if trainer.num_training_batches < float("inf"):
                ranks.check_shared(trainer.num_training_batches % steps, "an epoch's last step has")
            left = trainer.num_training_batches - before  # inf for a loader without a length
            self._current_step.start(min(steps, left))
            self._steps = trainer.global_step
        return self._current_step, before % steps

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        loss = super().backward(closure_loss, optimizer, *args, **options)
        if self._module().automatic_optimization:
            assert self._current_step is not None
            trainer: Any = self._module().trainer
            short = self._current_step.micro_batches < trainer.accumulate_grad_batches
            # Lightning has divided it by the number of an epoch's other steps
            self._current_step.add(
                loss * trainer.accumulate_grad_batches / self._current_step.micro_batches if short else loss
            )
        return loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **options: Any) -> Any:
        def whole_step() -> Any:
            result = closure()
            step = self._current_step
            assert step is not None
            if self._seen < step.micro_batches:
                raise ValueError(
                    f"the loader ended after {self._seen} of a step's {step.micro_batches} micro-batches on rank "
                    f"{self.global_rank}: give one whose length is known, or a multiple of a step's batches"
                )
            self.step_loss = step.finish()
            return result

        automatic = self._module().automatic_optimization
        return super().optimizer_step(optimizer, whole_step if automatic else closure, model, **options)

    def teardown(self) -> None:
        """As Lightning's, which besides moves the model to the CPU: parameters stay where their mesh is."""
        _rank_zero_only.rank = self._rank_before
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return full_state_dict(self._module(), rank0_only=True, cpu_offload=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return full_optimizer_state_dict(self._module(), optimizer, rank0_only=True, cpu_offload=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self._ranks is not None
        write = super().save_checkpoint
        self._ranks.run(f"saving {filepath}", lambda: write(checkpoint, filepath, storage_options))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_full_state_dict(self._module(), checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state_dict(self._module(), optimizer, state)

    def _module(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module


def _not_distributed() -> bool:
    return False


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _clip_by_norm(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_norm_(plugin.main_params(optimizer), clip_val)
