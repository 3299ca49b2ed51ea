"""Lightning for models of this library's: a strategy that wraps nothing, for tensor parallel ranks.

    module = MyLightningModule(tpi.parallelize(model, tp_group))
    strategy = tp_invariant.integrations.lightning.TensorParallelStrategy(tp_group)
    trainer = lightning.Trainer(strategy=strategy, devices=1, gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(module, loader)

`devices=1` is this rank's device. Every rank counts as the one process of its run, and rank 0 alone logs and writes:

    batches        are the same on every rank: loaders get no DistributedSampler, their workers the same seeds
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
from ..layers.grad_norm import clip_grad_norm_
from .optimizers import check_optimizer
from .ranks import Ranks

_rank_zero_only: Any = rank_zero.rank_zero_only  # its attribute `rank` says who logs
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class TensorParallelStrategy(SingleDeviceStrategy):
    """See this file's head.

    Args:
        tp_group: a ProcessGroup or 1-D DeviceMesh over all ranks of the job; None is TP=1.
        device: of this rank; None for the current one of CUDA where tp_group is NCCL's, else the CPU.

    Raises:
        ValueError: a tp_group with less ranks than the job has by WORLD_SIZE, which torchrun sets. When training
            begins: a precision other than 32-true, bf16-mixed and bf16-true; a model that is sharded over another
            group; ranks whose first batches differ; an optimizer whose bits depend on where a parameter is cut (or a
            TypeError).
    """

    strategy_name = "tp_invariant"

    def __init__(
        self,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        self.group = resolve_group(tp_group)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started not in (1, self.group.size):
            raise ValueError(
                f"the job has {started} ranks, and tp_group has {self.group.size}: data parallel ranks are not "
                "supported here; write the loop with tp_invariant.data_parallel.MicroBatchTree"
            )
        if device is None:
            nccl = self.group.process_group is not None and dist.get_backend(self.group.process_group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"
        super().__init__(device, **others)
        self.global_rank = self.group.rank
        self._ranks: Ranks | None = None
        self._compared = False
        self._rank_before = getattr(_rank_zero_only, "rank", 0)

    def set_world_ranks(self) -> None:
        """Lightning calls this when its Trainer is made: from now on rank 0 alone logs."""
        _rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *args: Any, **options: Any) -> None:
        gather_objects(None, self.group)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return gather_objects(obj, self.group)[src]

    # --- before training --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        module = self._module()
        self._ranks = Ranks(module, None)
        if self._ranks.size > 1 and ranks_of(self._ranks.tp) != ranks_of(self.group):
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

    def training_step(self, *args: Any, **options: Any) -> Any:
        if not self._compared:
            assert self._ranks is not None
            self._ranks.check_batches([args, options])
            self._compared = True
        return super().training_step(*args, **options)

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
