"""DTensors of which a rank has several pieces (partition_stride over a DeviceMesh), in torch's checkpoints.

torch.distributed.checkpoint takes what a rank has of a DTensor for one box of the full tensor. With partition_stride S
it is S boxes: [gate_r; up_r] is a part of the gate and a part of up. A tensor that has torch's checkpoint protocol as
attributes (`__create_write_items__` and its kin) is asked for its boxes, and a DTensor asks its local tensor first. So
`offer_pieces` gives the local tensors in state dicts these attributes. What is written can be read without this
library, and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Size, Tensor
from torch.optim import Optimizer

from .dtensors import check_placements, is_dtensor
from .torch_private import local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def _offsets(tensor: DTensor) -> list[int]:
    """Where this rank's part of a DTensor begins that has one box."""
    (box,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return list(box.offsets)


def pieces_of(tensor: DTensor, local: Tensor) -> list[tuple[Size, Tensor]]:
    """(offsets in the full tensor, view of `local`, which is like this rank's tensor) of each piece, if only one.

    Raises:
        ValueError: see `_strides`; or pieces that are not of one size.
    """
    from torch.distributed.tensor import DTensor, Replicate

    strides = _strides(tensor)
    if max(strides) == 1:
        return [(Size(_offsets(tensor)), local)]
    axis = max(range(len(strides)), key=strides.__getitem__)
    placement, stride, mesh = tensor.placements[axis], strides[axis], tensor.device_mesh
    dim, ranks = placement.dim, mesh.size(axis)  # type: ignore[attr-defined]
    if tensor.shape[dim] % (stride * ranks):
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} is placed as {tensor.placements} on {mesh}: its dim {dim} must "
            f"divide into {stride} pieces for each of {ranks} ranks"
        )
    piece = tensor.shape[dim] // stride
    width = piece // ranks
    # where the rest of it lies, by the placements without the one of several pieces
    others = [Replicate() if i == axis else other for i, other in enumerate(tensor.placements)]
    size = [tensor.shape[dim] if i == dim else n for i, n in enumerate(local.shape)]
    rest = DTensor.from_local(
        local.new_empty(size, device="meta"), mesh, others, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    start, pieces = _offsets(rest), []
    for number in range(stride):
        start[dim] = number * piece + mesh.get_local_rank(axis) * width
        pieces.append((Size(start), local.narrow(dim, number * width, width)))
    return pieces


def offer_pieces(tensor: Any) -> None:
    """Lets torch.distributed.checkpoint write and read the pieces of a state dict's tensor, if it has several.

    Raises:
        ValueError: see `pieces_of`.
    """
    if not is_dtensor(tensor) or max(_strides(tensor)) == 1:
        return
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    local: Any = local_tensor(tensor)
    # views of an alias: a view holds its base, and of `local`, which holds them, that would be a cycle in C++
    boxes: dict[Size, Tensor] = dict(pieces_of(tensor, local.detach()))
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
    local.__getstate__ = dict  # pickled, a tensor has none of these


def offer_pieces_of_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook of an optimizer's state dict: `offer_pieces` for each state that is placed like its parameter."""
    for states in state_dict["state"].values():
        for state in states.values():
            if is_dtensor(state):
                offer_pieces(state)
