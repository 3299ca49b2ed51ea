"""A stage of torch.distributed.pipelining that gives MicroBatchTree the gradients of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from ..comm.collectives import Group, resolve_group
from ..core.torch_private import TellsInference
from .micro_batch_tree import MicroBatchTree


class Stage(TellsInference, PipelineStage):
    """A torch.distributed.pipelining.PipelineStage for models of `parallelize`, and for MicroBatchTree.

        stage = tpi.data_parallel.Stage(model, mesh["pp"], device, tree=tree, counts=counts)
        schedule = Schedule1F1B(stage, n_microbatches=len(tree.share), loss_fn=loss_fn)
        schedule.step(ids)                                        # on the first stage; the last one: target=..
        tree.reduce()                                             # .grad is the gradient of the mean over all tokens

    The micro-batches of a schedule are those of tree.share, in this order; every rank of a stage's pipeline has the
    same ones. After the backward of each, the stage calls tree.add. So a step's gradients are those of one process that
    has all layers, bit for bit, whatever the schedule: GPipe, 1F1B, interleaved, and zero-bubble ones of models without
    tied embeddings. The loss is a sum over tokens; the tree divides it.

    A rank with several stages (interleaved schedules) makes one of each module of `stages_of(model)`, each with a tree
    of its own, and gives the schedule the list. Each parameter gets the attribute `pipeline_stage`, this stage's
    number, by which clip_grad_norm_ adds up the stages in their order.

    Of a Hugging Face model's output the stage returns `logits`, from now on in every call of the model.

    Args:
        module: this rank's stage: what parallelize(mesh=..) with a "pp" dim returns, one of `stages_of` it, or a module
            of your own that takes and returns tensors.
        pp_group: the ProcessGroup or 1-D DeviceMesh of the pipeline's stages; of one rank for a model in one stage.
        device: where the stage runs.
        tree: of this stage's parameters; of several stages on a rank each has its own. None: gradients are left to the
            caller.
        counts: what tree.add gets as `count`, for each micro-batch of the schedule. The list may be changed between
            steps (`stage.counts`). None: nothing is divided.
        stage_index, num_stages: of several stages of your own on a rank: the number of this one, and how many there are
            in all.

    Raises:
        ValueError: tied embeddings on two stages without a tree that has them, or after fully_shard; in a backward, a
            number of counts that is not that of the schedule's micro-batches.
        RuntimeError: in a backward, a schedule whose backwards are not in the order of the micro-batches.
        NotImplementedError: in a backward, a schedule that computes weight gradients later (zero bubble), with tied
            embeddings on two stages, which would wait for each other, or several chunks of the sequence on a rank.
    """

    def __init__(
        self,
        module: nn.Module,
        pp_group: dist.ProcessGroup | DeviceMesh | Group,
        device: torch.device | str,
        *,
        tree: MicroBatchTree | None = None,
        counts: Sequence[int | Tensor] | None = None,
        stage_index: int | None = None,
        num_stages: int | None = None,
    ) -> None:
        group = resolve_group(pp_group)
        if _trains_tied_embeddings(module) and not (tree is not None and tree.tied):
            raise ValueError(
                f"stage {group.rank} of {group.size} has an embedding that another stage shares: give it a tree, which "
                "adds the gradients of both, of all its parameters. After fully_shard, which drops what they say, tied "
                "embeddings are not supported"
            )
        index, stages = getattr(module, "pipeline_stage", (group.rank, group.size))
        super().__init__(
            module,
            index if stage_index is None else stage_index,
            stages if num_stages is None else num_stages,
            torch.device(device),
            group=group.process_group,
        )
        for p in module.parameters():
            p.pipeline_stage = self.stage_index  # type: ignore[attr-defined]
        self.tree, self.counts = tree, counts
        module.register_forward_pre_hook(self._clear, prepend=True)
        module.register_forward_hook(_logits_alone)

    def _clear(self, module: nn.Module, args: tuple) -> None:
        """Gives all ranks of the stage the same hidden states where torch looks for shapes: layers compare the ranks'
        values at their first call."""
        for x in args if self.infers and not self.is_first else ():
            x.detach().zero_()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward and self.tree is not None and self.tree.tied:
            raise NotImplementedError(
                f"stage {self.stage_index} of {self.num_stages} has an embedding that another stage shares, and the "
                "schedule computes weight gradients later, so that the two stages could wait for each other: choose "
                "GPipe or 1F1B, interleaved or not, or untie the embeddings"
            )
        if not full_backward and self.tree is not None and (held := self.tree.chunks_held) > 1:
            raise NotImplementedError(
                f"stage {self.stage_index} of {self.num_stages} has {held} chunks of each sequence on this rank, and "
                "the schedule computes weight gradients later, for the parameters and not for their chunks: choose "
                "GPipe or 1F1B, interleaved or not, or let sequence_chunks be the size of cp"
            )
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._add(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._add(bwd_chunk_id)

    def _add(self, micro_batch: int) -> None:
        if self.tree is None or not self.has_backward:
            return
        where = f"stage {self.stage_index} of {self.num_stages}"
        if micro_batch != self.tree.added:
            raise RuntimeError(
                f"{where} is at the backward of micro-batch {micro_batch} of its schedule, and its tree at "
                f"{self.tree.added}: each stage has a tree of its own and a schedule that takes them in "
                "order, and tree.reduce() ends each step"
            )
        if self.counts is not None and len(self.counts) != self.chunks:
            raise ValueError(f"{where} has {len(self.counts)} counts, and its schedule {self.chunks} micro-batches")
        self.tree.add(count=None if self.counts is None else self.counts[micro_batch])


def _trains_tied_embeddings(module: Any) -> bool:
    """Whether this stage has an embedding that another stage shares, and that is not frozen."""
    if not getattr(module, "has_tied_stage", False):
        return False
    ends = module.get_input_embeddings(), module.get_output_embeddings()  # one of them holds nothing here
    return any(p.requires_grad for end in ends for p in end.parameters())


def _logits_alone(module: nn.Module, args: Any, output: Any) -> Any:
    return getattr(output, "logits", output)
