"""DTensors of which a rank has several pieces (partition_stride over a DeviceMesh), in torch's checkpoints.

torch.distributed.checkpoint takes what a rank has of a DTensor for one contiguous box of the full tensor, and so does
`set_model_state_dict(.., broadcast_from_rank0=True)`. With partition_stride S it is S boxes: [gate_r; up_r] is a part
of the gate and a part of up. torch raises an error for some of these calls and reads other rows than the rank's,
silently, in the others; and nobody can be asked to convert every state dict on the way, since trainers make and pass
them themselves. So `mend_torch` replaces the four places in torch that decide it, for such DTensors alone, and what
torch 2.11 lacks. A DTensor asks its local tensor first for the boxes that it offers, so for the first three a local
tensor that answers is enough. Names, shapes and values stay: what is written can be read without this library, and the
other way round.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .dtensors import check_placements

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_mended = False


def mend_torch() -> None:
    """Once in a process, before it saves or loads such a DTensor."""
    global _mended
    if _mended:
        return
    from torch.distributed import _state_dict_utils
    from torch.distributed.tensor import DTensor

    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        setattr(DTensor, name, _asked_in_boxes(getattr(DTensor, name)))
    distribute: Any = _state_dict_utils._distribute_tensors

    @functools.wraps(distribute)
    def distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            found = local_state_dict.get(key)
            if isinstance(found, tuple) and max(_strides(found[0])) > 1:
                local_state_dict[key] = _filled(*found)  # which `distribute` passes by, since it is a tensor
        distribute(local_state_dict, keys, *args, **kwargs)

    _state_dict_utils._distribute_tensors = distribute_tensors
    _take_strides_as_they_are()
    _mended = True


def _take_strides_as_they_are() -> None:
    """torch 2.11 takes any strided placement for the order in which several cut a dim, and refuses one that is not.

    Later versions go on with the placements as they are, which is what is put in place here: for `full_tensor()`, full
    state dicts and every other redistribution. They also let `torch.load(weights_only=True)` read such placements.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.placement_types import _StridedShard

    if hasattr(_redistribute, "_StridedShardNotDecodableError"):
        return
    planner: Any = _redistribute.DTensorRedistributePlanner
    by_order = planner.generate_graph_based_transform_infos

    @functools.wraps(by_order)
    def transform_infos(self: Any, source: Any, target: Any, shape: Any) -> Any:
        try:
            return by_order(self, source, target, shape)
        except ValueError as error:
            if "use_strided_shard_as_shard_order" not in str(error):
                raise
            return self.generate_greedy_transform_infos(source, target)

    planner.generate_graph_based_transform_infos = transform_infos
    torch.serialization.add_safe_globals([_StridedShard])


def _asked_in_boxes(method: Any) -> Any:
    @functools.wraps(method)
    def in_boxes(self: DTensor, *args: Any) -> Any:
        return method(_as_boxes(self), *args)

    return in_boxes


def _strides(tensor: DTensor) -> list[int]:
    """How many pieces each mesh dim makes of its dim for a rank.

    Raises:
        ValueError: another mesh dim has cut the pieces again (fully_shard's default placement, see `fsdp_placement`).
    """
    check_placements(tensor)
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    # FSDP2's own stride, of a dim that several mesh dims cut, stands for one box
    alone = [dims.count(dim) == 1 for dim in dims]
    return [
        getattr(placement, "split_factor", 1) if one else 1
        for placement, one in zip(tensor.placements, alone, strict=True)
    ]


def _as_boxes(tensor: DTensor) -> DTensor:
    """The same DTensor, in the same memory, which offers a box for each piece; itself if it is one box.

    Raises:
        ValueError: see `_strides`; or pieces that are not of one size.
    """
    if hasattr(tensor._local_tensor, "__create_chunk_list__") or max(_strides(tensor)) == 1:
        return tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    local: Any = tensor._local_tensor.detach()
    # views of another alias: a view holds its base, and of `local`, which will hold them, that would be a cycle in C++
    boxes: dict[Size, Tensor] = dict(pieces_of(tensor, tensor._local_tensor.detach()))

    shape = tensor.shape

    def write_items(fqn: str, _: Any) -> list[WriteItem]:
        items = []
        for offsets, view in boxes.items():
            chunk = ChunkStorageMetadata(offsets, view.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(view), shape)
            items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    local.__create_write_items__ = write_items
    local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(o, view.shape) for o, view in boxes.items()]
    local.__get_tensor_shard__ = lambda index: boxes[index.offset]
    new: Any = type(tensor)
    return new(local, tensor._spec, requires_grad=False)


def _filled(tensor: DTensor, full: Tensor) -> DTensor:
    """`tensor` with the values of `full`, in its own memory; in new memory if it is on the meta device."""
    old = tensor._local_tensor.detach()
    local = torch.empty_like(old, device=full.device) if old.is_meta else old
    for offsets, view in pieces_of(tensor, local):
        view.copy_(full[tuple(slice(start, start + size) for start, size in zip(offsets, view.shape, strict=True))])
    new: Any = type(tensor)
    return new(local, tensor._spec, requires_grad=False) if old.is_meta else tensor


def pieces_of(tensor: DTensor, local: Tensor) -> list[tuple[Size, Tensor]]:
    """(offsets in the full tensor, view of `local`, which is like this rank's tensor) of each piece, if only one.

    Raises:
        ValueError: see `_strides`; or pieces that are not of one size.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    strides = _strides(tensor)
    if max(strides) == 1:
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return [(Size(offsets), local)]
    axis = max(range(len(strides)), key=strides.__getitem__)
    placement, stride, mesh = tensor.placements[axis], strides[axis], tensor.device_mesh
    dim, ranks = placement.dim, mesh.size(axis)  # type: ignore[attr-defined]
    others = list(tensor.placements)
    others[axis] = Replicate()
    if tensor.shape[dim] % (stride * ranks):
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} is placed as {tensor.placements} on {mesh}: its dim {dim} must "
            f"divide into {stride} pieces for each of {ranks} ranks"
        )
    # where the rest of it lies, by the placements without the one of several pieces
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, others)
    piece = tensor.shape[dim] // stride
    width = piece // ranks
    found = []
    for number in range(stride):
        start = list(offsets)
        start[dim] = number * piece + mesh.get_local_rank(axis) * width
        found.append((Size(start), local.narrow(dim, number * width, width)))
    return found
