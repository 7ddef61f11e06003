"""A run of fully_shard and Shampoo that resumes from its last checkpoint, as torchrun starts it.

usage: elastic_training.py FOLDER STEPS RANKS. RANKS begin; fewer may go on. Saves the parameters and those of a run in
one process. With DIES_AT_STEP in the environment, the process and the torchrun that started it are killed at that step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shampoo_tools import OPTIONS, set_gradients, shampoo, train
from sharded_shampoo_cases import fully_sharded, network
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def main(folder: Path, steps: int, ranks: int) -> None:
    # No rank waits for one that is dead.
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    begins = not any(folder.glob("[0-9]*"))
    while begins and dist.get_world_size() < ranks:
        time.sleep(0.1)  # until torchrun restarts all, because another host has come
    model = fully_sharded(dist.get_world_size())
    params = [*model.parameters()]
    optimizer = shampoo(params, **OPTIONS["all_buffers"])
    done = max([int(path.name) for path in folder.glob("[0-9]*")], default=0)
    if done:
        with optimizer.sharding():
            weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(done))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(done, steps):
        if str(step) == os.environ.get("DIES_AT_STEP"):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        set_gradients(params, step)
        optimizer.step()
        with optimizer.sharding():
            weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "next")
        if dist.get_rank() == 0:
            (folder / "next").rename(folder / str(step + 1))
            with (folder / "log").open("a") as log:
                log.write(f"{step} {dist.get_world_size()}\n")
        dist.barrier()
    values = [p.full_tensor().detach() for p in params]
    if dist.get_rank() == 0:
        torch.save((values, trained_alone(steps)), folder / "values.pt")
    dist.destroy_process_group()


def trained_alone(steps: int) -> list[torch.Tensor]:
    """Here, where MKL has the same environment, because a process that only does this imports for seconds."""
    params = [*network().parameters()]
    train(shampoo(params, **OPTIONS["all_buffers"]), params, range(steps))
    return [p.detach() for p in params]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
