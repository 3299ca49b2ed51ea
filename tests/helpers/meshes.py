"""Meshes that cases share: the threads of each of gloo's groups wake a hundred times a second, as long as it lives."""

from functools import cache

from torch.distributed import device_mesh


@cache
def init_device_mesh(device_type, mesh_shape, *, mesh_dim_names=None):
    """torch's, once for each process of the pool, which all have made the same ones."""
    return device_mesh.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)
