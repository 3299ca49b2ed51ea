"""Nothing of torch is assigned to: attributes of its modules and classes are the same objects afterwards."""

import os
import subprocess
import sys

PROGRAM = """
import sys, types
import torch
import torch.distributed as dist
import torch.distributed.checkpoint, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed.tensor.experimental, torch.distributed.tensor.parallel, torch.utils.checkpoint
import torch._dynamo, torch.compiler._cache  # which assign to torch

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                    for attribute, content in list(vars(value).items()):
                        found[f"{value.__module__}.{value.__qualname__}", attribute] = content
    return found

before = attributes()
import tp_invariant as tpi
from torch.distributed.device_mesh import init_device_mesh

if sys.argv[1:]:
    sys.modules["torch.optim.adam"].adam = lambda *args, **kwargs: None
    former = torch.distributed.tensor.DTensor.__create_chunk_list__
    torch.distributed.tensor.DTensor.__create_chunk_list__ = lambda self: former(self)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
for group in (mesh["tp"], dist.group.WORLD):
    with tpi.set_tp_invariant_mode(True):
        linears = torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8)
        model = torch.nn.Sequential(torch.nn.LayerNorm(8), *linears)
        tpi.parallelize(model, group, {"0": "replicate", "1": "colwise", "3": "rowwise"})
        stacked = tpi.Linear(8, 16, parallel_mode="column", partition_stride=2, tp_group=group)
        parameters = [*model.parameters(), *stacked.parameters()]
        for optimizer in (torch.optim.AdamW(parameters), tpi.optim.Muon([p for p in parameters if p.dim() == 2])):
            (model(torch.randn(4, 8)).square().mean() + stacked(torch.randn(4, 8)).square().mean()).backward()
            tpi.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.state_dict()
        tpi.full_state_dict(model), stacked.state_dict()
        with tpi.batch_invariant():
            torch.randn(4, 8) @ torch.randn(8, 8)
after = attributes()
# what torch itself remembers: modules that were imported since, state of the default group, counters, safe globals
own = ("torch._weights_only_unpickler", "_marked_safe_globals_set")
before.pop(own, None)
plain = (int, float, bool, str, tuple, type(None), types.ModuleType)
changed = sorted(
    ".".join(key)
    for key, value in before.items()
    if key[0] != "torch.compiler._cache.CacheInfo"
    and after.get(key, value) is not value
    and not isinstance(value, plain) and not isinstance(after[key], plain)
)
print("changed:", changed)
"""


def changed(tmp_path, changes):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), *(["change"] if changes else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("changed:")[2].strip()


def test_nothing_of_torch_is_assigned_to(tmp_path):
    assert changed(tmp_path, False) == "[]"
    control = changed(tmp_path, True)
    assert "torch.optim.adam.adam" in control and "DTensor.__create_chunk_list__" in control
