"""An MLP made tensor-parallel: the dry run, a wrong plan refused, all ranks in one process, real ranks.

python examples/01_mlp.py                              dry run and proof; no ranks needed
torchrun --nproc-per-node 2 examples/01_mlp.py         and then two ranks, for real
"""

import torch
import torch.distributed as dist
from torch import nn

import autotp


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc2 = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Normed(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.softmax(self.fc1(x), dim=-1))  # needs the whole row, a rank has half of it


def on_every_rank(model: nn.Module, plan: autotp.Plan, x: torch.Tensor) -> None:
    """Shard the model over the ranks that torchrun started, and compare with the unsharded output."""
    dist.init_process_group("gloo")
    expected = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autotp.shard(model, plan, inputs=x)  # in place: the optimizer's parameters are still the model's
    difference = (model(x) - expected).abs().max().item()
    model(x).square().sum().backward()
    optimizer.step()
    print(f"rank {dist.get_rank()}: fc1.weight {tuple(model.fc1.weight.shape)}, difference {difference:.1e}")
    dist.destroy_process_group()
    if difference > 1e-5:
        raise SystemExit("the sharded model computes something else")


def main() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(5, 64)
    plan = autotp.Plan(rules={"fc1": "column", "fc2": "row"})
    if dist.is_torchelastic_launched():
        on_every_rank(model, plan, x)
        return

    print(autotp.analyze(model, plan, tp=2, inputs=x))

    print("\nThe same plan where it would be wrong:\n")
    refused = autotp.analyze(Normed(), plan, tp=2, inputs=x)
    assert not refused.ok
    for finding in refused.diagnostics:
        print(finding)

    print("\nAll three ranks of tp=3, in this process:")  # 256 features over 3: 86 + 85 + 85
    result = autotp.verify(model, plan, tp=3, inputs=x)
    print(f"outputs differ by {result.max_output_diff:.1e}, gradients by {result.max_grad_diff:.1e}")
    assert result.ok


if __name__ == "__main__":
    main()
