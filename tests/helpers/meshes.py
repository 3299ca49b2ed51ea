"""Meshes that cases share: the threads of each of gloo's groups wake a hundred times a second, as long as it lives."""

from functools import cache

import torch
import torch.distributed as dist
from fuzz_runtime import group_of
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tp_invariant as tpi


@cache
def init_device_mesh(device_type, mesh_shape, *, mesh_dim_names=None):
    """torch's, once for each process of the pool, which all have made the same ones."""
    return device_mesh.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)


@cache
def new_group(ranks):
    """A process group that these ranks alone make, once for each process: others of the pool know nothing of it."""
    return group_of(list(ranks), f"the ranks {ranks} of a case")


def replica_groups(dp, tp, ep, strided=False, mesh=False):
    """This rank's tp_group (None for one rank), dp_group and expert_parallel_group, over dp replicas of tp ranks.

    ep: over how many replicas experts are divided, consecutive ones or, strided, every (dp / ep)-th one.
    mesh: DeviceMeshes, with all replicas in one group of experts.
    """
    if mesh:
        assert ep == dp
        both = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        return both["tp"], both["dp"], init_device_mesh("cpu", (dp * tp,), mesh_dim_names=("ep",))["ep"]
    ranks = torch.arange(dp * tp).view(dp, tp)
    blocks = ranks.view(ep, -1, tp).transpose(0, 1) if strided else ranks.view(-1, ep, tp)
    mine = []
    for kind in (ranks, ranks.T, blocks.flatten(1)):
        mine.append(new_group(next(tuple(row) for row in kind.tolist() if dist.get_rank() in row)))
    return None if tp == 1 else mine[0], mine[1], mine[2]


def mesh_or_group(tp_group, kind):
    """What a layer takes as tp_group: a mesh over the group ("mesh", which makes DTensors), or the group ("group")."""
    return DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",)) if kind == "mesh" else tp_group


def shard_fully(model, mesh, reshard=True):
    """fully_shard of each layer, and the rest. reshard=False: gathered parameters stay after forward and backward.

    Not of experts that are divided over data-parallel ranks already.
    """
    experts = [m for m in model.modules() if isinstance(m, tpi.Experts) and m.over_data]
    options = dict(
        mesh=mesh, shard_placement_fn=tpi.fsdp_placement, reshard_after_forward=reshard,
        ignored_params={p for m in experts for p in m.parameters()},
    )  # fmt: skip
    for module in (*(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")), model):
        fully_shard(module, **options)
    model.set_reshard_after_backward(reshard)
