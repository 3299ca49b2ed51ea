"""Lightning for models of this library's: a strategy that wraps nothing, for tensor and data parallel ranks.

    module = MyLightningModule(tpi.parallelize(model, mesh["tp"]))
    strategy = tp_invariant.integrations.lightning.TensorParallelStrategy(mesh["tp"], dp_group=mesh["dp"])
    trainer = lightning.Trainer(strategy=strategy, devices=1, gradient_clip_val=1.0, accumulate_grad_batches=4)
    trainer.fit(module, loader)

`devices=1` is this rank's device. Every rank counts as the one process of its run, and rank 0 alone logs and writes:

    batches        are read by every rank: loaders get no DistributedSampler, their workers the same seeds
    a step         has accumulate_grad_batches micro-batches at every degree, which data parallel ranks share: each
                   calls training_step for those of its share, and a MicroBatchTree sums the gradients
    logging        in training_step is of this rank's micro-batches; `strategy.step_loss` is the last step's, of all
    random numbers in training_step (dropout) depend on the first seed, the step and the micro-batch alone
    evaluation     is of the whole set on every data parallel rank
    clipping       is tp_invariant.clip_grad_norm_
    checkpoints    are those that Lightning writes of the whole model on one process; any degree goes on from them
    decisions      of callbacks by a clock, and the names of files, are rank 0's

A resumed run has the same bits at every degree. It need not have those of a run that was not stopped: Lightning's
checkpoints hold no states of random generators, and with which batches a run goes on is up to Lightning.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..checkpoint.full_optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from ..checkpoint.full_state import full_state_dict, load_full_state_dict
from ..comm.collectives import Group, ranks_of, resolve_group
from ..comm.wire import gather_objects
from ..data_parallel.micro_batch_tree import resolve_dp_group
from ..layers.grad_norm import clip_grad_norm_
from .optimizers import check_optimizer
from .ranks import Ranks
from .steps import Step, seeded

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
            groups or a fully_shard that do not fit the job (`Ranks`); ranks whose batches differ; fewer micro-batches
            than data parallel ranks, or, of fully_shard, no multiple of them; data parallel ranks with different
            parameters or buffers, or manual optimization; an optimizer whose bits depend on where a parameter is cut
            (or a TypeError).
    """

    strategy_name = "tp_invariant"

    def __init__(
        self,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
        device: torch.device | str | None = None,
        *,
        dp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        **others: Any,
    ) -> None:
        self.group = resolve_group(tp_group)
        self.dp = resolve_group(None) if dp_group is None else resolve_dp_group(dp_group)
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
        self._step: Step | None = None
        self._seen = 0  # of the current step's micro-batches
        self._steps = 0  # before the current one
        self._seed = 0
        self._rank_before = getattr(_rank_zero_only, "rank", 0)

    def set_world_ranks(self) -> None:
        """Lightning calls this when its Trainer is made: from now on rank 0 alone logs."""
        _rank_zero_only.rank = self.global_rank

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
        module = self._module()
        self._ranks = Ranks(module, self.dp if self.dp.size > 1 else None)
        self._step = None
        self._seed = self._ranks.gather(torch.initial_seed())[0]
        if self._ranks.tp.size * self.group.size > 1 and ranks_of(self._ranks.tp) != ranks_of(self.group):
            raise ValueError(
                f"the model is sharded over the ranks {ranks_of(self._ranks.tp)}, and the strategy's tp_group has "
                f"{ranks_of(self.group)}: give parallelize and TensorParallelStrategy the same group"
            )
        plugin = self.precision_plugin
        if plugin.precision not in _PRECISIONS:
            raise ValueError(
                f"Trainer(precision={plugin.precision!r}) on rank {self.global_rank} is not supported: choose one of "
                f"{', '.join(_PRECISIONS)}"
            )
        if self.dp.size > 1 and not module.automatic_optimization:
            raise ValueError(
                f"automatic_optimization=False on rank {self.global_rank} with {self.dp.size} data parallel ranks is "
                "not supported: write the loop with tp_invariant.data_parallel.MicroBatchTree"
            )
        plugin.clip_grad_by_norm = functools.partial(_clip_by_norm, plugin)  # type: ignore[method-assign]
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_optimizer(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        seed = getattr(dataloader, "worker_init_fn", None)
        if isinstance(seed, functools.partial) and "rank" in seed.keywords:  # Lightning's own
            dataloader.worker_init_fn = functools.partial(seed, rank=0)
        return dataloader

    # --- a step -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **options: Any) -> Any:
        """The module's own; None, which Lightning leaves out, for a micro-batch of another data parallel rank."""
        module, ranks = self._module(), self._ranks
        assert ranks is not None
        if not module.automatic_optimization:
            if self._step is None:
                self._step = Step(ranks, [module])
                ranks.check_batches([args, options])
            return super().training_step(*args, **options)
        step, index = self._current(ranks)
        if index == 0:
            ranks.check_batches([args, options])
        self._seen = index + 1
        if index not in step.share:
            return None
        with seeded((self._seed, self._steps, index), self.root_device):
            return super().training_step(*args, **options)

    def _current(self, ranks: Ranks) -> tuple[Step, int]:
        """The current step, which its first micro-batch starts, and the micro-batch's index in it."""
        trainer: Any = self._module().trainer
        steps, before = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        if self._step is None:
            self._step = Step(ranks, [self._module()])
        if before % steps == 0:
            if steps < self.dp.size:
                raise ValueError(
                    f"accumulate_grad_batches={steps} on rank {self.global_rank}, and dp_group has {self.dp.size} "
                    "ranks: it is the number of micro-batches in a step of all data parallel ranks together, and must "
                    "be at least as many"
                )
            assert self._ranks is not None
            if trainer.num_training_batches < float("inf"):
                self._ranks.check_shared(trainer.num_training_batches % steps, "an epoch's last step has")
            left = trainer.num_training_batches - before  # inf for a loader without a length
            self._step.start(min(steps, left))
            self._steps = trainer.global_step
        return self._step, before % steps

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        loss = super().backward(closure_loss, optimizer, *args, **options)
        if self._module().automatic_optimization:
            assert self._step is not None
            self._step.add(loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **options: Any) -> Any:
        def whole_step() -> Any:
            result = closure()
            assert self._step is not None
            if self._seen < self._step.micro_batches:
                raise ValueError(
                    f"the loader ended after {self._seen} of a step's {self._step.micro_batches} micro-batches on rank "
                    f"{self.global_rank}: give one whose length is known, or a multiple of a step's batches"
                )
            self.step_loss = self._step.finish()
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


def _clip_by_norm(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_norm_(plugin.main_params(optimizer), clip_val)
