"""What each of two ranks holds: a column layer without gather, into a row layer with a parallel input.

The two-rank CPU walk-through of FairScale's model parallelism, with autotp.nn. The processes are started
by torch.multiprocessing.spawn; torchrun does as well.

python examples/04_two_ranks.py
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing

import autotp
from autotp.groups import place
from autotp.nn import ColumnParallelLinear, RowParallelLinear

torch.set_printoptions(precision=1, sci_mode=False, linewidth=110)


def on_rank(rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    mesh = autotp.initialize(tp=2, backend="gloo")

    def count(master: torch.Tensor) -> None:
        """Fill the full weight by 0, 1, 2, …, so that one sees who holds what."""
        master.copy_(torch.arange(master.numel()).view_as(master))

    column = ColumnParallelLinear(2, 4, bias=False, gather_output=False, init_method=count, group=mesh)
    row = RowParallelLinear(4, 3, bias=False, input_is_parallel=True, init_method=count, group=mesh)
    x = torch.tensor([[1.0, 2.0]])
    hidden = column(x)
    y = row(hidden)

    whole = x @ column.get_master_weight().T @ row.get_master_weight().T
    for turn in range(world):
        dist.barrier()
        if turn == rank:
            print(f"rank {rank}: {place(mesh)}")
            print(f"  column weight, rows of the full 4 x 2:\n    {column.weight.tolist()}")
            print(f"  its output, 2 of 4 features:\n    {hidden.tolist()}")
            print(f"  row weight, columns of the full 3 x 4:\n    {row.weight.tolist()}")
            print(f"  the sum over the ranks, whole on both:\n    {y.tolist()}", flush=True)
    torch.testing.assert_close(y, whole)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as probe:  # a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(on_rank, (2, port), nprocs=2)


if __name__ == "__main__":
    main()
