"""One of the ranks that torchrun starts: load this rank's shard, embed the sentences, rank 0 saves them.

torchrun --nproc-per-node 2 -m demo.rank SHARDS MODEL RESULT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autotp
from demo.embed import embed


def main(shards: str, model: str, result: str) -> None:
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        sharded = autotp.from_pretrained(shards, mesh=mesh)
        held = torch.tensor(sum(parameter.numel() for parameter in sharded.parameters()))
        every_rank = [torch.zeros_like(held) for _ in range(dist.get_world_size())]
        dist.all_gather(every_rank, held)
        embeddings = embed(sharded, Path(model))
        if dist.get_rank() == 0:
            torch.save({"embeddings": embeddings, "held": [int(n) for n in every_rank]}, result)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
