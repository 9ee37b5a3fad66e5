"""python -m demo: shows autotp on a real model, and ends in an error when anything is not as promised."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel

from demo.embed import SENTENCES, embed, model_folder

MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LARGEST_DIFFERENCE = 1e-5
TP = 2


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was found."""

    name: str
    ok: bool
    found: str


def compare(reference: torch.Tensor, sharded: torch.Tensor) -> list[Check]:
    """Each embedding against its unsharded one: the largest difference and the smallest cosine."""
    difference = (reference - sharded).abs().amax(-1)  # (sentences,)
    cosine = torch.nn.functional.cosine_similarity(reference.double(), sharded.double(), dim=-1)
    print(f"  {'difference':>10}  {'cosine':>12}  sentence")
    for one, angle, sentence in zip(difference.tolist(), cosine.tolist(), SENTENCES, strict=True):
        print(f"  {one:10.1e}  {angle:12.10f}  {sentence:.60}")
    largest, smallest = difference.max().item(), cosine.min().item()
    return [
        Check("largest difference", largest <= LARGEST_DIFFERENCE, f"{largest:.1e} (at most 1e-5)"),
        Check("smallest cosine", smallest >= 1 - 1e-6, f"{smallest:.10f} (at least 0.999999)"),
    ]


def same_bytes(one: Path, other: Path) -> Check:
    """Whether two files are the same, byte for byte."""
    digests = [sha256(path) for path in (one, other)]
    found = f"{one.stat().st_size:,} bytes, sha256 {digests[1][:12]}…"
    return Check("merged file", digests[0] == digests[1], found)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(*command: str | Path, module: str = "autotp") -> None:
    """Run a command line as a user would, and show it; its output goes to the terminal."""
    words = [str(word) for word in command]
    shown = {"autotp": "autotp", "torch.distributed.run": "torchrun"}[module]
    print(f"\n$ {shown} {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", module, *words], env=environment(), check=False)
    if done.returncode:
        raise SystemExit(f"the demo stops: {shown} ended with exit code {done.returncode}")


def environment() -> dict[str, str]:
    """Nothing is fetched, ranks talk over this machine's loopback, and threads do not fight for cores."""
    threads = max(1, (os.cpu_count() or TP) // TP)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback,
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }


def main() -> int:
    started = time.monotonic()
    model = model_folder()
    checks = [Check("model file", sha256(model / "model.safetensors") == MODEL_SHA256, "sha256 as published")]
    with tempfile.TemporaryDirectory(prefix="autotp-demo-") as folder:
        shards, back, result = (Path(folder, name) for name in ("shards", "merged", "result.pt"))

        print("1. Dry run: what each rank would hold, with the layouts proven. No ranks, no weights.")
        for tp in (TP, 4):
            run("plan", model, "--tp", str(tp), "--prove")

        print(f"\n2. Convert the checkpoint to {TP} rank shards.")
        run("convert", model, shards, "--tp", str(TP))

        print(f"\n3. Start {TP} ranks, each loads its shard and embeds {len(SENTENCES)} sentences.")
        options = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(TP))
        run(*options, "-m", "demo.rank", shards, model, result, module="torch.distributed.run")

        print("\n4. Compare with the unsharded model.")
        whole = AutoModel.from_pretrained(model)
        of_ranks = torch.load(result, weights_only=True)
        checks += compare(embed(whole, model), of_ranks["embeddings"])

        print("\n5. Merge the shards back.")
        run("merge", shards, back)
        checks.append(same_bytes(model / "model.safetensors", back / "model.safetensors"))

    parameters = sum(parameter.numel() for parameter in whole.parameters())
    held = " + ".join(f"{n / 1e6:.1f} M" for n in of_ranks["held"])
    print(f"\nall-MiniLM-L6-v2, {parameters / 1e6:.1f} M parameters, tp={TP}: the ranks hold {held}")
    for check in checks:
        print(f"  {'ok' if check.ok else 'FAILED':6}  {check.name:18}  {check.found}")
    print(f"  {time.monotonic() - started:.0f} s")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    os.environ.update(environment())
    sys.exit(main())
