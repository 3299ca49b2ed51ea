"""Imported by rank processes of the tests: all groups of gloo that cases make share the default group's device.

A device is a thread that wakes a hundred times a second. By itself each group has its own, and stays as long as a cache
of torch holds a mesh with it: after some hundred cases idle ranks would take a quarter of a core.
"""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

backend = distributed_c10d.ProcessGroupGloo


class OnOneDevice(backend):
    devices = None

    def __init__(self, store, rank, size, timeout):
        if OnOneDevice.devices is None and dist.is_initialized():
            OnOneDevice.devices = dist.group.WORLD._get_backend(torch.device("cpu")).options._devices
        if OnOneDevice.devices is None:
            super().__init__(store, rank, size, timeout)
            return
        options = backend._Options()
        options._devices, options._timeout = OnOneDevice.devices, timeout
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = OnOneDevice
