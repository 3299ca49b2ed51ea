"""One rank of the runs of test_faults.py: trains a tiny model with checkpoints and a digest log, and may be killed.

    python fault_worker.py RANK WORLD PORT OPTIONS       OPTIONS: JSON; see `main`

Alone, on gloo or NCCL: no torchrun, which ends the other ranks by itself when one dies.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import tp_invariant as tpi


def build(tp_group, device):
    torch.manual_seed(0)
    common = dict(tp_group=tp_group, device=device, sequence_parallel=True)
    model = torch.nn.Sequential(
        tpi.LayerNormLinear(32, 48, parallel_mode="column", **common), tpi.Linear(48, 32, parallel_mode="row", **common)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(tp_group, device, options):
    rank, world = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    folder = Path(options["folder"])
    model, optimizer = build(tp_group, device)
    first = 0
    if options.get("resume"):
        # `pretend`: the number of a step that the checkpoint is not of
        first = tpi.checkpoint.load(folder / "checkpoint", model, optimizer)["step"] + options.get("pretend", 0)
    log = tpi.DigestLog(folder / options["log"], model, tp_group=tp_group)

    def die(grad):
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first, options["steps"]):
        x = torch.randn(12, 32, generator=torch.Generator().manual_seed(100 + step)).chunk(world)[rank].to(device)
        hidden = model[0](x)
        if step == options.get("die_at") and rank == options["who"]:
            hidden.register_hook(die)  # when backward has gone through the second layer
        loss = gathered_mean_square(model[1](hidden), tp_group)
        optimizer.zero_grad()
        loss.backward()
        norm = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
        optimizer.step()
        log.write(step, loss=loss, gradient_norm=norm)
        if (step + 1) % 2 == 0 and options.get("save"):
            tpi.checkpoint.save(folder / "checkpoint", model, optimizer, extra={"step": step + 1})
    log.close()


def gathered_mean_square(y, tp_group):
    return tpi.regions.gather_sequence(y, tp_group).square().mean()


def main():
    rank, world, port = map(int, sys.argv[1:4])
    options = json.loads(sys.argv[4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device(options["device"], rank) if options["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=options["timeout"]))
    with tpi.set_tp_invariant_mode(options.get("mode", True)):
        for one in options["runs"]:  # several, since a start takes seconds
            train(dist.group.WORLD, device, {**options, **one})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
