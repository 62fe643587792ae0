"""Measure the effect of spikes on a run with and without responses, and count false alarms on clean runs.

    python benchmarks/spikes.py --file spikes.json
    python benchmarks/spikes.py --file spikes.json --alarms 5000
    python benchmarks/spikes.py --quick

Trains a small Llama on bundled text (bytes) in one process. A case is one fault at a random step. Its strength is drawn from a range whose
weak end is harmless. There are five cases each of a window of poisoned data, a wrong learning rate for ten steps, and a flipped bit in a
weight, a moment or a gradient. Each case is trained without responses and with all of them (`stability.answers`, everything else by
default), and compared with the clean run of the same seed. Three clean seeds give the noise. Thresholds are the defaults of `[stability]`;
cases are drawn from a fixed seed. A case counts if the run without responses ends at least 5 % worse. `--alarms N` trains N clean steps of
each of three models (dense, experts, Muon), with warm-up, a batch that doubles after a third of the steps, and sequences of half the length
in the last third.

Each finished run is written to the file with commit and machine, and is skipped the next time. The table is printed from the file.
A run takes about half a minute on an idle core; `--quick` does two cases of 160 steps, and 100 clean steps of each model.
"""

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from megalith.data.prepare import prepare
from megalith.data.tokenizer import load
from megalith.events import Rewound, Skipped, Spike, of_kind, read
from megalith.fleet.secure.key import new
from megalith.prove.spikes import Fault, Kind, train
from megalith.prove.worlds import run_ranks
from megalith.spec.presets import presets
from megalith.spec.run import ANSWERS, RunSpec

ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[Kind, str] = {
    "poison": "data",
    "rate": "schedule",
    "weight": "hardware",
    "moment": "hardware",
    "gradient": "hardware",
}
"""Kind of fault -> the correct cause."""
EACH, LASTS, SEEDS = 5, 10, (0, 1, 2)
COUNTED = 0.05
DENSE = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 260, "context": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "experts": (presets()["deepseek-tiny"].values | {"vocab": 260, "context": 64}, {}),
    "muon": (DENSE, {"kind": "muon", "iteration": "fp32"}),
}


@dataclass(frozen=True)
class Ran:
    """Result of a run."""

    name: str
    validation: float
    spikes: list[dict[str, Any]]
    skipped: int
    rewound: list[dict[str, Any]]
    fault: dict[str, Any] | None
    commit: str
    machine: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="where finished runs are kept; default: nowhere")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--alarms", type=int, default=0, metavar="N", help="train N clean steps of each model, and no cases")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and train nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = given.file or folder / "spikes.json"
        if not given.table:
            prepare(["bundled:austen"], tokenizer=load("bytes"), out=folder / "data", validation=0.03)
            steps = 160 if given.quick else given.steps
            if not given.alarms:
                run_cases(file, folder, steps, quick=given.quick)
            if given.alarms or given.quick:
                run_alarms(file, folder, given.alarms or 100)
        print_table(file)


def spec_of(folder: Path, steps: int, *, model: str = "dense", seed: int = 0, answers: tuple[str, ...] = ()) -> RunSpec:
    shape, optimizer = MODELS[model]
    return RunSpec.model_validate(
        {
            "model": shape,
            "data": {"path": str(folder / "data")},
            "train": {"steps": steps, "global_batch": 8, "seq_len": 64, "precision": "fp32", "seed": seed},
            "optimizer": {"lr": 3e-3, "warmup": 20, "schedule": "cosine"} | optimizer,
            "stability": {"answers": answers},
            "validation": {"every": steps, "samples": 256},
            "fleet": {"digest": False, "verify_every": 0},
        }
    )


def cases(steps: int) -> Iterator[tuple[str, Fault]]:
    """Return the faults, which are the same in every run of the script."""
    draw = random.Random(20)
    for number in range(EACH):
        for kind in KINDS:
            step, place = draw.randrange(steps * 3 // 10, steps * 3 // 4), draw.random()
            match kind:
                case "poison":
                    fault = Fault(kind, step, draw.uniform(0.05, 1.0), LASTS)
                case "rate":
                    fault = Fault(kind, step, math.exp(draw.uniform(math.log(1.5), math.log(40))), LASTS)
                case _:
                    fault = Fault(kind, step, draw.randrange(20, 31), place=place)
            yield f"{kind} {number}", fault


def run_cases(file: Path, folder: Path, steps: int, *, quick: bool) -> None:
    for seed in SEEDS[: 1 if quick else None]:
        run(file, folder, f"clean {seed}", spec_of(folder, steps, seed=seed))
    if quick:
        middle = steps * 5 // 8
        chosen = [("poison 0", Fault("poison", middle, 1.0, LASTS)), ("rate 0", Fault("rate", middle, 20.0, LASTS))]
    else:
        chosen = list(cases(steps))
    for name, fault in chosen:
        run(file, folder, f"{name} control", spec_of(folder, steps), fault)
        run(file, folder, f"{name} answered", spec_of(folder, steps, answers=ANSWERS), fault)


def run_alarms(file: Path, folder: Path, steps: int) -> None:
    for model in MODELS:
        run(file, folder, f"alarms {model} {steps}", varied(spec_of(folder, steps, model=model)))


def varied(spec: RunSpec) -> RunSpec:
    """Return the run with a growing batch and a change of the sequence length."""
    tables, train = spec.model_dump(exclude_unset=True), spec.train
    third = train.steps // 3 * train.global_batch
    tables["train"]["batch_ramp"] = [{"begin": third, "global_batch": 2 * train.global_batch}]
    tables["data"]["phases"] = [{"begin": 3 * third, "seq_len": train.seq_len // 2}]
    return RunSpec.model_validate(tables)


def run(file: Path, folder: Path, name: str, spec: RunSpec, fault: Fault | None = None) -> None:
    """Train, unless the run is already in the file."""
    if any(one.name == name for one in kept(file)):
        return
    where = folder / name.replace(" ", "-")
    try:
        (validation,) = run_ranks(_train, 1, spec, where, (fault,) if fault else (), timeout=3600.0)
    except RuntimeError as error:
        if "SpikeError" not in str(error) and "NotFinite" not in str(error):
            raise
        validation = float("inf")  # the run stopped
    told = list(read(where))
    spikes = [asdict(one) for one in of_kind(told, Spike)]
    skipped, rewound = len(of_kind(told, Skipped)), [asdict(one) for one in of_kind(told, Rewound)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    ran = Ran(name, validation, spikes, skipped, rewound, asdict(fault) if fault else None, commit.strip(), machine)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(ran)) + "\n")
    print(f"{name}: validation loss {validation:.4f}, {len(spikes)} spikes told", flush=True)


def _train(rank: int, spec: RunSpec, folder: Path, faults: tuple[Fault, ...]) -> float:
    folder.mkdir()
    return train(rank, spec, folder, faults, key=new()).validation


def kept(file: Path) -> list[Ran]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Ran(**json.loads(line)) for line in lines]


def print_table(file: Path) -> None:
    found = {one.name: one for one in kept(file)}
    clean = [one.validation for name, one in found.items() if name.startswith("clean")]
    if "clean 0" in found:
        noise = f", their spread {100 * stdev(clean) / mean(clean):.2f} %" if len(clean) > 1 else ""
        print(f"\nclean: validation loss {found['clean 0'].validation:.4f} (seed 0); {len(clean)} seeds{noise}")
        _print_cases(found, found["clean 0"].validation)
    for name, one in found.items():
        if name.startswith("alarms"):
            print(f"{name} clean steps: {len(one.spikes)} false alarms, at steps {[each['step'] for each in one.spikes]}")


def _print_cases(found: dict[str, Ran], clean: float) -> None:
    print(
        f"{'case':12} {'step':>4} {'strength':>8} {'control':>9} {'answered':>9} {'skipped':>7} {'rewinds':>7}  likeliest cause"
    )
    counted, healed, named, right = 0, 0, 0, 0
    for name, control in found.items():
        answered = found.get(name.replace(" control", " answered"))
        if not name.endswith(" control") or answered is None or control.fault is None:
            continue
        worse, left = control.validation / clean - 1, answered.validation / clean - 1
        causes = [one["causes"][0]["cause"] for one in answered.spikes if one["causes"]]
        first = causes[0] if causes else "none"
        counts = not worse < COUNTED
        counted, healed = counted + counts, healed + (counts and left <= 0.005)
        named, right = named + bool(answered.spikes), right + (first == KINDS[control.fault["kind"]])
        row = f"{name.removesuffix(' control'):12} {control.fault['step']:>4} {control.fault['strength']:>8.3g} {100 * worse:>+8.2f}%"
        mark = "*" if counts else " "
        print(f"{row}{mark}{100 * left:>+8.2f}% {answered.skipped:>7} {len(answered.rewound):>7}  {first}")
    print(
        f"* counted: {counted}, of which {healed} end within 0.5 % of clean; {right} of {named} spikes had the right cause first"
    )


if __name__ == "__main__":
    main()
