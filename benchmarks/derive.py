"""How long `"auto"` takes: derive and prove a tiny Llama, and derive for the shapes of large models.

| what | at most |
|---|---|
| `shard(tiny Llama, "auto")` on one rank's thread, all of it | 3 s |
| derive on Llama 3.1 405B over 8, 126 layers on the meta device: traces, search and proof | 10 s |
| derive on DeepSeek-V3 over 8, 61 layers | 15 s |

Processor time; the models are built before. The peak of memory beyond the built model is printed too.
The large shapes are those of the public configurations (config.json of meta-llama/Llama-3.1-405B; the
defaults of transformers' DeepseekV3Config).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch
import transformers
from torch import nn

import autotp
from autotp.comm import simulate

LLAMA_405B = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip


def llama(**sizes: int) -> nn.Module:
    """A Llama on the current device."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def deepseek() -> nn.Module:
    """The shape of DeepSeek-V3 on the current device."""
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config()).eval()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose parameters take no memory; buffers are real."""
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return model


def timed(work: Callable[[], object]) -> tuple[float, float, object]:
    """Processor seconds, further MiB at the peak, and what came out."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    result = work()
    spent = time.process_time() - started
    return spent, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, result


def derived(model: nn.Module) -> autotp.Analysis:
    """The plan of a model over 8 ranks, derived and proven."""
    return autotp.analyze(model, "auto", tp=8)


def tiny() -> object:
    """All of `shard` with a derived plan, as two ranks of one process run it."""
    return simulate(2, lambda group: autotp.shard(llama(**TINY), "auto", group))


def main() -> int:
    """Measure and print; 1 when something takes longer than it may."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    timed(tiny)  # what is imported and compiled once
    rows = [("shard, tiny Llama, two ranks together", 2 * 3.0, tiny)]
    large = on_meta(lambda: llama(**LLAMA_405B))
    rows.append(("derive, Llama 405B, tp 8", 10.0, lambda: derived(large)))
    deep = on_meta(deepseek)
    rows.append(("derive, DeepSeek-V3, tp 8", 15.0, lambda: derived(deep)))
    late = 0
    for name, limit, work in rows:
        seconds, more, found = timed(work)
        whole = isinstance(found, autotp.Analysis) and not (found.ok and found.sharded_fraction > 0.99)
        print(f"{name}: {seconds:.1f} s (at most {limit:.0f} s), +{more:.0f} MiB", "not all is cut" * whole)
        late += seconds > limit or whole
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
