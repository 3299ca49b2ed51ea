"""Random numbers that are written into a DTensor, as torch.nn.init does, or drawn like one: those of the whole tensor.

torch fills each rank's part by a generator of that rank, or with the same numbers on every rank where a device has no
such generator (a CPU). The values then depend on the degree. For DTensors on the meshes of this library's layers a
handler in torch's dispatcher draws the whole tensor on every rank, as if it were a plain one, and keeps this rank's
part. So the values are those of one rank, if all ranks have one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dtensors import local_of, new_dtensor
from .pieces import pieces_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FILLS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")
_LIKES = ("rand_like", "randn_like")
_meshes: set[frozenset[int]] = set()  # the ranks of the meshes of this library's layers


def note_mesh(ranks: Sequence[int]) -> None:
    _meshes.add(frozenset(ranks))


def _is_on_ours(x: DTensor) -> bool:
    """Whether a dim of its mesh is the mesh of one of our layers; fully_shard has added others."""
    mesh, here = x.device_mesh, x.device_mesh.get_coordinate()
    if here is None or any(placement.is_partial() for placement in x.placements):
        return False
    lines = [tuple(slice(None) if axis == dim else i for axis, i in enumerate(here)) for dim in range(mesh.ndim)]
    return any(frozenset(mesh.mesh[line].tolist()) in _meshes for line in lines)


def mend_fills() -> None:
    """Once in a process that has DTensors. What a release of torch does not have is left as it is."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = getattr(DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        return

    def fill(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, *others = args
        local: Tensor = local_of(x)
        if not _is_on_ours(x) or kwargs.get("dtype") not in (None, x.dtype):
            # As torch does it without a handler. Were this one taken out meanwhile, another thread would miss it.
            call = dispatcher.unwrap_to_op_info(operator, args, kwargs)
            dispatcher.sharding_propagator.propagate(call)
            result = dispatcher._dispatch_get_local_results_slow_path(operator, args, call)
            return dispatcher.wrap(result, call.output_sharding.output_spec) if operator in likes else x
        full = operator(local.new_empty(x.shape), *others, **kwargs)
        if operator in likes:
            local = torch.empty_like(local)
            x = new_dtensor(DTensor, local, x._spec)
        for offsets, view in pieces_of(x, local):
            view.copy_(full[tuple(slice(i, i + size) for i, size in zip(offsets, view.shape, strict=True))])
        return x

    likes = {getattr(torch.ops.aten, name).default for name in _LIKES}
    packets = [getattr(torch.ops.aten, name) for name in _FILLS]
    fills = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    for operator in (*likes, *fills):
        if operator._overloadname != "Tensor":  # of bernoulli_: a tensor of probabilities
            handlers.setdefault(operator, fill)
