"""Five models as people write them, each with its plan: what is edited in their code, and every rank checked.

python examples/05_own_code.py
"""

import torch
from own_code import encoder, experts, nanogpt, vit, whisper

import autotp

HEADS, RANKS = 5, 3  # 2 + 2 + 1


def main() -> None:
    torch.manual_seed(0)
    for family in (nanogpt, vit, whisper, experts, encoder):
        model, inputs = family.example(HEADS)
        analysis = autotp.analyze(model, family.plan(HEADS), tp=RANKS, inputs=inputs)
        assert analysis.ok, analysis
        print(analysis.edits)
        result = autotp.verify(model, family.plan(HEADS), tp=RANKS, inputs=inputs)
        assert result.ok, result
        name = family.__name__.rpartition(".")[2]
        print(f"{name}, {HEADS} heads over {RANKS} ranks: outputs differ by {result.max_output_diff:.1e}\n")


if __name__ == "__main__":
    main()
