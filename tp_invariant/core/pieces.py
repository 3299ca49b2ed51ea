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
    (box,) = tensor.__create_chunk_list__()
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


class _Boxes:
    """What torch.distributed.checkpoint asks a tensor for that has several boxes of one of `shape`."""

    def __init__(self, shape: Size, boxes: dict[Size, Tensor] | None) -> None:
        self._shape, self._boxes = shape, boxes

    def __deepcopy__(self, memo: dict[int, Any]) -> _Boxes:
        return _Boxes(self._shape, None)  # the copy of a tensor has other memory

    @property
    def boxes(self) -> dict[Size, Tensor]:
        if self._boxes is None:
            raise ValueError(
                f"a copy of a state dict's tensor of shape {tuple(self._shape)}, of which each rank has several pieces "
                "(partition_stride): torch.distributed.checkpoint can save and load the state dict itself (save, not "
                "async_save), and tp_invariant.checkpoint.save does either"
            )
        return self._boxes

    def write_items(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk, view in zip(self.chunk_list(), self.boxes.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(view), self._shape)
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def chunk_list(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self.boxes.items()]

    def tensor_shard(self, index: Any) -> Tensor:
        return self.boxes[index.offset]


def offer_pieces(tensor: Any) -> None:
    """Lets torch.distributed.checkpoint write and read the pieces of a state dict's tensor, if it has several.

    Raises:
        ValueError: see `pieces_of`.
    """
    if is_dtensor(tensor) and max(_strides(tensor)) > 1:
        local: Any = local_tensor(tensor)
        # views of an alias: a view holds its base, and of `local`, which holds them, that would be a cycle in C++
        boxes = _Boxes(tensor.shape, dict(pieces_of(tensor, local.detach())))
        local.__create_write_items__ = boxes.write_items
        local.__create_chunk_list__ = boxes.chunk_list
        local.__get_tensor_shard__ = boxes.tensor_shard
        local.__getstate__ = dict  # pickled, a tensor has none of these


def offer_pieces_of_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook of an optimizer's state dict: `offer_pieces` for each state that is placed like its parameter."""
    for states in state_dict["state"].values():
        for state in states.values():
            if is_dtensor(state):
                offer_pieces(state)
