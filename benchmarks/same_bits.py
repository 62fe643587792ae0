"""Check that training still computes the same bits as at an older commit.

    python benchmarks/same_bits.py 689ccd2
    python benchmarks/same_bits.py HEAD --only recompute --steps 2

trains eleven small recipes with the older commit and with this tree, each through its own command line, on this machine. Then it compares
every tensor of the checkpoints after every step. A tensor of the older checkpoint must be in the newer one with the same bytes; the newer
one may hold more. No digest is kept between calls, because bits depend on the processor and on torch. The script prints a table and
exits with 1 if anything differs. It takes about four minutes on two idle cores.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from megalith.checkpoint import folder
from megalith.checkpoint.read import read_full

ROOT = Path(__file__).resolve().parents[1]

RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    # no clipping: since 689ccd2 a norm of more than 65,536 numbers on one rank is summed in blocks, and has other last bits
    "plain": ("cpu-zero-0", ("plan.data=1", "train.precision=bf16", "optimizer.clip=0")),
    "zero-1": ("cpu-zero-1", ("train.precision=bf16",)),
    "1f1b, zero-2": ("cpu-1f1b", ("plan.pipeline=2", "plan.data=2", "plan.zero=2")),
    "recompute, zero-3": ("cpu-recompute", ("train.precision=bf16",)),
    "hsdp": ("cpu-hsdp", ()),
    "tensor": ("cpu-tensor", ("train.precision=bf16",)),
    "context": ("cpu-context-ring", ("plan.context=2",)),
    "zero-bubble, post-validation": ("cpu-zb-h2", ("plan.pipeline=2", "plan.data=2")),
    "zero-bubble, recompute": ("cpu-zb-h1", ("plan.pipeline=2", "plan.data=2", "plan.recompute=full", "train.precision=bf16")),
    "expert, expert tensor": ("cpu-expert-tensor", ()),
    "multi-token, pipeline, context": ("cpu-multi-token", ("train.precision=bf16",)),
}
"""Subject of a recipe -> its file in recipes/ of the older commit, which both trees can read, and the changed settings."""

COMMON = ("train.global_batch=8", "train.seq_len=64", "optimizer.warmup=2", "launch.threads=1", "checkpoint.every=1")
COMMON += ("checkpoint.asynchronous=false",)  # the next save would be skipped while this one is still being written


class Compared(NamedTuple):
    """Train one recipe with both trees. Return the number of tensors compared over all steps, and the first difference,
    if any."""

    tensors: int
    difference: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older commit")
    parser.add_argument("--only", action="append", choices=RECIPES, metavar="NAME", help=f"one of: {'; '.join(RECIPES)}")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    different = False
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        root = Path(name)
        old = check_out(given.commit, root / "old")
        data = prepare(old, root / "data")
        print(f"{'recipe':32}{'tensors compared':>18}  {given.commit} and {ROOT.name}, {given.steps} steps", flush=True)
        for number, recipe in enumerate(given.only or RECIPES):
            then, now = (root / f"{side}-{number}" for side in ("then", "now"))
            with ThreadPoolExecutor() as both:
                runs = [both.submit(train, tree, recipe, given.steps, old, data, run) for tree, run in ((old, then), (ROOT, now))]
            for run in runs:
                run.result()
            tensors, difference = compare(then, now, steps=given.steps)
            different |= bool(difference)
            print(f"{recipe:32}{tensors:18}  {difference or 'same bits'}", flush=True)
    sys.exit(different)


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of `commit` into `folder`."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder


def prepare(tree: Path, folder: Path) -> Path:
    """Prepare the recipes' data with `tree`'s command line."""
    command = ["data", "prepare", "bundled:austen", "--tokenizer", "bytes", "--validation", "0.03", "--out", str(folder)]
    megalith(tree, *command)
    return folder


def train(tree: Path, recipe: str, steps: int, recipes: Path, data: Path, run: Path) -> None:
    """Train a recipe of the tree `recipes` with `tree`'s files into the run folder `run`, keeping the checkpoint of every step."""
    file, changes = RECIPES[recipe]
    given = (*COMMON, f"train.steps={steps}", f"checkpoint.keep={steps}", f"data.path={data}", *changes)
    settings = [word for change in given for word in ("--set", change)]
    megalith(tree, "train", str(recipes / "recipes" / f"{file}.toml"), "--run-dir", str(run), *settings)


def megalith(tree: Path, *arguments: str) -> None:
    """Run a command of `tree`. If it fails, exit with its output."""
    command = [sys.executable, "-m", "megalith.cli", *arguments]
    ended = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(
            f"{tree}: megalith {' '.join(arguments)} exited with {ended.returncode}\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
        )


def compare(old: Path, new: Path, *, steps: int) -> Compared:
    """Compare the checkpoints of two run folders, step by step, up to the first difference."""
    tensors = 0
    for step in range(1, steps + 1):
        ours = dict(digests(new, step))
        for name, digest in digests(old, step):
            if name not in ours:
                return Compared(tensors, f"step {step}: {name} is missing")
            if digest != ours[name]:
                return Compared(tensors, f"step {step}: {name} differs: sha256 {digest[:12]}, now {ours[name][:12]}")
            tensors += 1
    return Compared(tensors, "")


def digests(run: Path, step: int) -> Iterator[tuple[str, str]]:
    """The name and sha256 of every whole tensor in the checkpoint of `step`."""
    for name, tensor in sorted(read_full(run / "checkpoints" / folder.name(step)).items()):
        content = tensor.flatten().view(torch.uint8).numpy().tobytes()
        yield name, hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
