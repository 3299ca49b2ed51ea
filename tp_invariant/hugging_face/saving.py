"""`save_pretrained` of a parallelized model writes whole weights, and what would take a shard for the whole is refused.

transformers' own functions see this rank's shards. So a parallelized model gets a class derived from its own, with
functions of these names. A model around it, or one that was given sharded layers by hand, keeps transformers' own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.full_state import WHOLE, full_state_dict, model_group, reshard, run_on_all_ranks, tensor_specs
from ..comm.collectives import Group, on_mesh, ranks_of, resolve_group
from ..comm.meeting import wait_for_all, wait_without_limit
from ..core.derived_class import derived_class
from ..core.dtensors import is_dtensor, local_of
from ..layers.other_stage import names_of_other_stages
from ..layers.parameters import ShardSpec

_ADVICE = (
    "A rank has only its part of the weights, so call save_pretrained on every rank, not under `if rank == 0`: rank 0 "
    "of the job writes, the others send"
)
_logger = logging.getLogger("tp_invariant")


def install_saving(model: nn.Module) -> None:
    """Gives `model`, a PreTrainedModel, the functions of this module before its class's."""
    if not isinstance(model, _Saving):
        model.__class__ = derived_class(type(model), _Saving)


class _Saving(nn.Module):
    """What the classes of parallelized models derive from, before the class that the model had."""

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **options: Any
    ) -> None:
        """transformers' save_pretrained, of whole weights: the files that the model would write without parallelize.

        A collective: call it on every rank. Rank 0 of the job writes, and the weights pass through its CPU's memory;
        the others return when it is done, however long it takes. After fully_shard, too, on every rank of its mesh. A
        warning says so if rank 0 is none of the model's ranks: then these write nothing.

        Raises:
            RuntimeError: on every rank that has called it: other ranks have not; or they hold different whole weights.
            ValueError: a state_dict that is given has this rank's shards; none is given, and the model is a stage of a
                pipeline.
            OSError and what else transformers raises: on every rank of the model.
        """
        former: Any = super()
        if state_dict is None and names_of_other_stages(self):
            raise ValueError(
                f"this {type(self).__name__} is a stage of a pipeline: give save_pretrained the whole model's "
                "state_dict, tp_invariant.full_state_dict(model, pp_group=..), on one rank"
            )
        save = functools.partial(former.save_pretrained, save_directory)
        groups = groups_of(self)
        if state_dict is not None and groups:
            check_whole(self, state_dict)
        if state_dict is not None or not groups:
            save(is_main_process, state_dict, *args, **options)
            return
        save_on_rank_0(
            self,
            save_directory,
            is_main_process,
            lambda: full_state_dict(self, rank0_only=True, cpu_offload=True),
            lambda full: save(True, _tied(self, full), *args, **options),
        )

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **options: Any
    ) -> Any:
        """transformers' resize_token_embeddings where it changes nothing, as in scripts that always call it.

        Raises:
            ValueError: the vocabulary would get another size.
        """
        model: Any = self
        embedding = model.get_input_embeddings()
        rows = getattr(embedding, "num_embeddings", None)  # of the whole vocabulary
        size = rows if new_num_tokens is None else new_num_tokens
        if size is not None and pad_to_multiple_of:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size == rows:
            return embedding
        raise ValueError(
            f"resize_token_embeddings(new_num_tokens={new_num_tokens}, pad_to_multiple_of={pad_to_multiple_of}) of a "
            f"{type(self).__name__} that parallelize has changed, whose vocabulary has size {rows}: transformers would "
            "take this rank's rows for the whole vocabulary. Call it before parallelize"
        )


def save_on_rank_0(
    model: Any,
    save_directory: Any,
    is_main_process: bool,
    gather: Callable[[], dict[str, Tensor]],
    write: Callable[[dict[str, Tensor]], None],
) -> None:
    """write(gather()) on rank 0 of the job, gather() on all ranks of the model; see `save_pretrained`."""
    groups = groups_of(model)
    for group in groups:
        wait_for_all(group, f"save_pretrained({str(save_directory)!r})", _ADVICE)
    ranks = _ranks(model)
    if is_main_process and 0 not in ranks and dist.get_rank() == ranks[0]:
        _logger.warning(
            "save_pretrained(%r) writes nothing on rank %s, which have this model, because rank 0 of the job writes. "
            "Where rank 0 has no replica of it, call tp_invariant.full_state_dict(model) on all of them, and "
            "save_pretrained with this as state_dict on rank %d",
            str(save_directory),
            ", ".join(map(str, ranks)),
            ranks[0],
        )
    full = gather()

    def write_there() -> None:
        if full and is_main_process and (not dist.is_initialized() or dist.get_rank() == 0):
            write(full)

    step: Any = write_there
    for group in groups:  # an error of the one that writes is raised on all
        step = functools.partial(run_on_all_ranks, group, "save_pretrained", functools.partial(_all_end, group, step))
    step()


def _all_end(group: Group, step: Callable[[], None]) -> None:
    """step(), which takes one rank long, and then a wait that has no time-out as a collective has."""
    try:
        step()
    finally:
        wait_without_limit(group)


def groups_of(model: Any) -> list[Group]:
    """The groups whose ranks have parts of the model's weights: one for each mesh dim. None: all are whole here."""
    reshard(model)
    dtensors = [p for p in model.parameters() if is_dtensor(p)]
    for p in dtensors:
        if p.device_mesh.ndim > 1:
            return [resolve_group(group) for group in p.device_mesh.get_all_groups()]
    group = model_group(model)
    return [group] if group.size > 1 or dtensors else []


def _ranks(model: Any) -> list[int]:
    """The ranks of the job that have parts of the model's weights, as this rank."""
    for p in model.parameters():
        if is_dtensor(p) and p.device_mesh.ndim > 1:
            return sorted(on_mesh(p.device_mesh).ranks)
    return sorted(ranks_of(model_group(model)))


def check_whole(model: Any, state_dict: Any) -> None:
    state = model.state_dict(keep_vars=True)
    specs = tensor_specs(model)
    for name, tensor in state.items():
        given = state_dict.get(name)
        if not isinstance(given, Tensor) or not isinstance(tensor, Tensor):
            continue
        if is_dtensor(given) or given.shape in _shapes_of_parts(tensor, specs.get(id(tensor), WHOLE)):
            raise ValueError(
                f"{name} in the state_dict that was given to save_pretrained on rank {dist.get_rank()} is "
                f"a {type(given).__name__} with this rank's part alone: give none, or "
                "tp_invariant.full_state_dict(model)"
            )


def _shapes_of_parts(tensor: Tensor, spec: ShardSpec) -> set[tuple[int, ...]]:
    """The shapes that a part of `tensor` may have: over the tensor-parallel ranks, fully_shard's, or both."""
    local, whole = tuple(local_of(tensor).shape), list(tensor.shape)
    parts = {local}
    if spec.dim is not None and spec.group.size > 1:
        if is_dtensor(tensor) and on_mesh(tensor.device_mesh).ranks.issuperset(ranks_of(spec.group)):
            whole[spec.dim] //= spec.group.size  # else a plain shard, which fully_shard may have cut
        parts.add(tuple(whole))
        whole[spec.dim] = whole[spec.dim] * spec.group.size - spec.padding
    return parts - {tuple(whole)}


def _tied(model: Any, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """`full` with one tensor for parameters that are one, of which transformers then writes one."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: full[names[name]] for name in full}
