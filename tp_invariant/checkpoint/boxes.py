"""State dicts with DTensors for torch.distributed.checkpoint: each stacked piece as a contiguous box of its own.

torch.distributed.checkpoint takes what a rank has of a DTensor for one contiguous box of the full tensor. With
partition_stride S it is S boxes: [gate_r; up_r] is a part of the gate and a part of up. A DTensor asks its local tensor
first for the boxes that it offers, so here the local tensor is one that answers. Names, shapes and values stay, so that
what is written can be read without this library, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor

from ..core.dtensors import check_placements, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_boxes(state_dict: Any) -> Any:
    """The same state dict, in the same memory, for torch.distributed.checkpoint's `save` and `load`.

        state = get_state_dict(model, optimizer)  # of torch.distributed.checkpoint.state_dict
        dcp.save(tpi.checkpoint.as_boxes({"model": state[0], "optimizer": state[1]}), checkpoint_id=path)
        ..
        state = get_state_dict(model, optimizer)
        dcp.load(tpi.checkpoint.as_boxes({"model": state[0], "optimizer": state[1]}), checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])

    DTensors of which a rank has several pieces (layers with partition_stride over a DeviceMesh, and their optimizer's
    state) offer a box for each piece; everything else stays as it is. Without it `dcp.save` raises an error for them
    ("overlapping chunks"), and **`dcp.load` reads other rows than theirs, silently**.

    Args:
        state_dict: a nest of dicts, lists and tuples.

    Raises:
        ValueError: a DTensor whose pieces are cut again by another mesh dim (fully_shard's default placement, see
            `fsdp_placement`), or are not of one size.
    """
    if isinstance(state_dict, Mapping):
        return {key: as_boxes(value) for key, value in state_dict.items()}
    if isinstance(state_dict, (list, tuple)):
        return type(state_dict)(map(as_boxes, state_dict))
    if is_dtensor(state_dict):
        check_placements(state_dict)
        placements = state_dict.placements
        dims = [getattr(placement, "dim", None) for placement in placements]
        # FSDP2's own stride, of a dim that several mesh dims cut, stands for one box
        alone = [dims.count(dim) == 1 for dim in dims]
        strides = [
            getattr(placement, "split_factor", 1) if one else 1
            for placement, one in zip(placements, alone, strict=True)
        ]
        return _in_boxes(state_dict, strides) if max(strides) > 1 else state_dict
    return state_dict


def _in_boxes(tensor: DTensor, strides: list[int]) -> DTensor:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    boxes: dict[Size, Tensor] = dict(_pieces(tensor, strides))

    def write_items(fqn: str, _: Any) -> list[WriteItem]:
        items = []
        for offsets, view in boxes.items():
            chunk = ChunkStorageMetadata(offsets, view.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(view), tensor.shape)
            items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    local: Any = tensor._local_tensor.detach()
    local.__create_write_items__ = write_items
    local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(o, view.shape) for o, view in boxes.items()]
    local.__get_tensor_shard__ = lambda index: boxes[index.offset]
    new: Any = type(tensor)
    return new(local, tensor._spec, requires_grad=False)


def _pieces(tensor: DTensor, strides: list[int]) -> list[tuple[Size, Tensor]]:
    """(offsets in the full tensor, view of this rank's tensor) of each piece."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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
    local = tensor._local_tensor.detach()
    piece = tensor.shape[dim] // stride
    width = piece // ranks
    found = []
    for number in range(stride):
        start = list(offsets)
        start[dim] = number * piece + mesh.get_local_rank(axis) * width
        found.append((Size(start), local.narrow(dim, number * width, width)))
    return found
