"""`save_pretrained` of a parallelized model writes whole weights, and what would take a shard for the whole is refused.

transformers' own functions see this rank's shards. So a parallelized model has functions of its own under their names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..checkpoint.full_state import full_state_dict, model_entries, model_group, run_on_all_ranks
from ..comm.collectives import Group, resolve_group
from ..comm.meeting import wait_for_all
from ..core.dtensors import is_dtensor

_ADVICE = (
    "A rank has only its part of the weights, so call save_pretrained on every rank, not under `if rank == 0`: rank 0 "
    "of the job writes, the others send"
)


def install_saving(model: Any) -> None:
    """Gives `model`, a PreTrainedModel, the functions of this module in place of its class's."""
    model.save_pretrained = functools.partial(_save_pretrained, model)
    model.resize_token_embeddings = functools.partial(_resize_token_embeddings, model)


def _save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **options: Any
) -> None:
    """transformers' save_pretrained, of whole weights: the files that the model would write without parallelize.

    A collective: call it on every rank. Rank 0 of the job writes, and the weights pass through its CPU's memory; the
    others return when it is done. After fully_shard, too, on every rank of its mesh.

    Raises:
        RuntimeError: on every rank that has called it: other ranks have not; or they hold different whole weights.
        ValueError: a state_dict that is given has this rank's shards.
        OSError and what else transformers raises: on every rank of the model.
    """
    save = functools.partial(type(model).save_pretrained, model, save_directory)
    groups = _groups(model)
    if state_dict is not None and groups:
        _check_whole(model, state_dict)
    if state_dict is not None or not groups:
        save(is_main_process, state_dict, *args, **options)
        return
    for group in groups:
        wait_for_all(group, f"save_pretrained({str(save_directory)!r})", _ADVICE)
    full = full_state_dict(model, rank0_only=True, cpu_offload=True)

    def write() -> None:
        if full and is_main_process and (not dist.is_initialized() or dist.get_rank() == 0):
            save(True, _tied(model, full), *args, **options)

    step: Any = write
    for group in groups:  # an error of the one that writes is raised on all
        step = functools.partial(run_on_all_ranks, group, "save_pretrained", step)
    step()


def _groups(model: Any) -> list[Group]:
    """The groups whose ranks have parts of the model's weights: one for each mesh dim. None: all are whole here."""
    dtensors = [p for p in model.parameters() if is_dtensor(p)]
    for p in dtensors:
        if p.device_mesh.ndim > 1:
            return [resolve_group(group) for group in p.device_mesh.get_all_groups()]
    group = model_group(model)
    return [group] if group.size > 1 or dtensors else []


def _check_whole(model: Any, state_dict: Any) -> None:
    for name, entry in model_entries(model, fully_sharded=True).items():
        given = state_dict.get(name)
        if is_dtensor(given) or (given is not None and given.shape == entry.tensor.shape != entry.full_shape):
            raise ValueError(
                f"{name} in the state_dict that was given to save_pretrained on rank {entry.spec.group.rank} is "
                f"a {type(given).__name__} with this rank's part alone: give none, or "
                "tp_invariant.full_state_dict(model)"
            )


def _tied(model: Any, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """`full` with one tensor for parameters that are one, of which transformers then writes one."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: full[names[name]] for name in full}


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **options: Any
) -> Any:
    if new_num_tokens is None and pad_to_multiple_of is None:  # then it only returns the embedding
        return model.get_input_embeddings()
    raise ValueError(
        f"resize_token_embeddings(new_num_tokens={new_num_tokens}, pad_to_multiple_of={pad_to_multiple_of}) of a "
        f"{type(model).__name__} that parallelize has changed: transformers would take this rank's rows for the whole "
        "vocabulary. Call it before parallelize"
    )
