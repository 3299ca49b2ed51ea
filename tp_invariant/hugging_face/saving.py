"""`save_pretrained` of a parallelized model writes whole weights, and what would take a shard for the whole is refused.

transformers' own functions see this rank's shards. So a parallelized model has functions of its own under their names.
A model around it, of which only a part was parallelized, or that was given sharded layers by hand, has them by its
class: torch tells who gets a submodule, and with the first sharded layer PreTrainedModel gets functions that look for
such layers at each call.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..checkpoint.full_state import WHOLE, full_state_dict, model_group, reshard, run_on_all_ranks, tensor_specs
from ..comm.collectives import Group, on_mesh, ranks_of, resolve_group
from ..comm.meeting import wait_for_all, wait_without_limit
from ..core.dtensors import is_dtensor, local_of
from ..core.graph_breaks import never_a_frame_of_its_own
from ..layers.parameters import ShardedModule, ShardSpec

_ADVICE = (
    "A rank has only its part of the weights, so call save_pretrained on every rank, not under `if rank == 0`: rank 0 "
    "of the job writes, the others send"
)
_logger = logging.getLogger("tp_invariant")


def install_saving(model: Any) -> None:
    """Gives `model`, a PreTrainedModel, the functions of this module in place of its class's."""
    model.save_pretrained = _Method(_save_pretrained, model)
    model.resize_token_embeddings = _Method(_resize_token_embeddings, model)


class _Method:
    """A function of a model that is stored on it, and does not hold it: a cycle would keep its memory for a while."""

    def __init__(self, function: Callable[..., Any], model: Any) -> None:
        self._function, self._model = function, weakref.ref(model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(self._of(), *args, **options)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model has a method of its own
        return _Method, (self._function, self._of())

    def _of(self) -> Any:
        model = self._model()
        if model is None:
            raise ReferenceError(f"the model of this {self._function.__name__.strip('_')} is gone: keep the model")
        return model


@never_a_frame_of_its_own
def _look_for_layers(owner: nn.Module, name: str, child: nn.Module | None) -> None:
    """A hook of every registration of a submodule, in any module."""
    if isinstance(child, ShardedModule) and "transformers.modeling_utils" in sys.modules:
        _install_for_all()


@functools.cache
def _install_for_all() -> None:
    """PreTrainedModel's functions, and these of a model that holds layers of this library, whoever put them there."""
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    save, resize = kind.save_pretrained, kind.resize_token_embeddings

    @functools.wraps(save)
    def save_pretrained(
        model: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        if _has_layers(model) and groups_of(model):
            if state_dict is None:
                return _save_pretrained(model, save_directory, is_main_process, None, *args, **options)
            check_whole(model, state_dict)
        return save(model, save_directory, is_main_process, state_dict, *args, **options)

    @functools.wraps(resize)
    def resize_token_embeddings(model: Any, *args: Any, **options: Any) -> Any:
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        ours = any(end is not None and _has_layers(end) for end in ends)
        return _resize_token_embeddings(model, *args, **options) if ours else resize(model, *args, **options)

    kind.save_pretrained, kind.resize_token_embeddings = save_pretrained, resize_token_embeddings


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(part, ShardedModule) for part in module.modules())


def _save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **options: Any
) -> None:
    """transformers' save_pretrained, of whole weights: the files that the model would write without parallelize.

    A collective: call it on every rank. Rank 0 of the job writes, and the weights pass through its CPU's memory; the
    others return when it is done, however long it takes. After fully_shard, too, on every rank of its mesh. A warning
    says so if rank 0 is none of the model's ranks: then these write nothing.

    Raises:
        RuntimeError: on every rank that has called it: other ranks have not; or they hold different whole weights.
        ValueError: a state_dict that is given has this rank's shards.
        OSError and what else transformers raises: on every rank of the model.
    """
    save = functools.partial(type(model).save_pretrained, model, save_directory)
    groups = groups_of(model)
    if state_dict is not None and groups:
        check_whole(model, state_dict)
    if state_dict is not None or not groups:
        save(is_main_process, state_dict, *args, **options)
        return
    save_on_rank_0(
        model,
        save_directory,
        is_main_process,
        lambda: full_state_dict(model, rank0_only=True, cpu_offload=True),
        lambda full: save(True, _tied(model, full), *args, **options),
    )


def save_on_rank_0(
    model: Any,
    save_directory: Any,
    is_main_process: bool,
    gather: Callable[[], dict[str, Tensor]],
    write: Callable[[dict[str, Tensor]], None],
) -> None:
    """write(gather()) on rank 0 of the job, gather() on all ranks of the model; see `_save_pretrained`."""
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


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **options: Any
) -> Any:
    """transformers' resize_token_embeddings where it changes nothing, as in scripts that always call it.

    Raises:
        ValueError: the vocabulary would get another size.
    """
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)  # of the whole vocabulary
    asked = rows if new_num_tokens is None else new_num_tokens
    if asked is not None and pad_to_multiple_of:
        asked = -(-asked // pad_to_multiple_of) * pad_to_multiple_of
    if asked == rows:
        return embedding
    raise ValueError(
        f"resize_token_embeddings(new_num_tokens={new_num_tokens}, pad_to_multiple_of={pad_to_multiple_of}) of a "
        f"{type(model).__name__} that parallelize has changed, whose vocabulary has size {rows}: transformers would "
        "take this rank's rows for the whole vocabulary. Call it before parallelize"
    )


register_module_module_registration_hook(_look_for_layers)
