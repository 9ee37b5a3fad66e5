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
from transformers.utils import logging

from demo.embed import SENTENCES, embed, model_folder

MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
NAME = "all-MiniLM-L6-v2"
LARGEST_DIFFERENCE = 1e-5
TP = 2
LOCAL = "--standalone --local-addr 127.0.0.1"
ROOT = Path(__file__).resolve().parent.parent


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


def run(command: str, *, folder: Path) -> None:
    """Run a command line in `folder` as a user would, and show it; its output goes to the terminal."""
    print(f"\n$ {command}", flush=True)
    program, *words = command.split()
    module = {"autotp": "autotp", "torchrun": "torch.distributed.run"}[program]
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=folder, env=environment(), check=False)
    if done.returncode:
        raise SystemExit(f"the demo stops: {program} ended with exit code {done.returncode}")


def environment() -> dict[str, str]:
    """Nothing is fetched, ranks talk over this machine's loopback, and threads do not fight for cores."""
    threads = max(1, (os.cpu_count() or TP) // TP)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback,
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def main() -> int:
    started = time.monotonic()
    model = model_folder()
    checks = [Check("model file", sha256(model / "model.safetensors") == MODEL_SHA256, "sha256 as published")]
    with tempfile.TemporaryDirectory(prefix="autotp-demo-") as temporary:
        folder = Path(temporary)
        (folder / NAME).symlink_to(model, target_is_directory=True)

        print("1. Dry run: what each rank would hold, with the layouts proven. No ranks, no weights.")
        for tp in (TP, 4):
            run(f"autotp plan {NAME} --tp {tp} --prove", folder=folder)

        print(f"\n2. Convert the checkpoint to {TP} rank shards.")
        run(f"autotp convert {NAME} shards --tp {TP}", folder=folder)

        print(f"\n3. Start {TP} ranks; each loads its shard and embeds {len(SENTENCES)} sentences.")
        run(f"torchrun {LOCAL} --nproc-per-node {TP} -m demo.rank shards {NAME} result.pt", folder=folder)

        print("\n4. Compare with the unsharded model.")
        logging.disable_progress_bar()
        whole = AutoModel.from_pretrained(model)
        of_ranks = torch.load(folder / "result.pt", weights_only=True)
        checks += compare(embed(whole, model), of_ranks["embeddings"])

        print("\n5. Merge the shards back.")
        run("autotp merge shards merged", folder=folder)
        checks.append(same_bytes(model / "model.safetensors", folder / "merged" / "model.safetensors"))

    parameters = sum(parameter.numel() for parameter in whole.parameters())
    held = " + ".join(f"{n / 1e6:.1f} M" for n in of_ranks["held"])
    print(f"\n{NAME}, {parameters / 1e6:.1f} M parameters, tp={TP}: the ranks hold {held}")
    for check in checks:
        print(f"  {'ok' if check.ok else 'FAILED':6}  {check.name:18}  {check.found}")
    print(f"  {time.monotonic() - started:.0f} s")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
