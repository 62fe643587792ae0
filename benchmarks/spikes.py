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

The file keeps finished runs, as benchmarks/cases.py says, and the loss and norm of each step of the runs that count alarms. The watch
changes nothing in such a run, so the table shows the alarms that today's rule raises for these numbers. A run takes about half a minute
on an idle core. `--quick` does two cases of 160 steps, and 100 clean steps of each model.
"""

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import cases
from megalith.data.prepare import prepare
from megalith.data.tokenizer import load
from megalith.events import Rewound, Skipped, Spike, Step, of_kind, read
from megalith.fleet.secure.key import new
from megalith.prove.spikes import Fault, Kind, train
from megalith.prove.worlds import run_ranks
from megalith.spec.phases import Phases
from megalith.spec.presets import presets
from megalith.spec.run import ANSWERS, RunSpec
from megalith.train.decide import Update, Vitals, known_after
from megalith.train.stability.history import History

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


Run = tuple[RunSpec, tuple[Fault, ...]]


@dataclass(frozen=True)
class Ran:
    """Result of a run."""

    case: str
    validation: float
    spikes: list[dict[str, Any]]
    skipped: int
    rewound: list[dict[str, Any]]
    fault: dict[str, Any] | None
    commit: str
    machine: str
    losses: Sequence[float] = ()
    """The loss of each step, in a run that counts alarms."""
    norms: Sequence[float] = ()
    """The gradient norm of each step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="where finished runs are kept; default: nowhere")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--alarms", type=int, default=0, metavar="N", help="train N clean steps of each model, and no cases")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], help="those of --alarms")
    parser.add_argument("--quick", action="store_true")
    cases.add_arguments(parser)
    parser.add_argument("--table", action="store_true", help="print the table of the file, and train nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = given.file or folder / "spikes.json"
        if not given.table:
            prepare(["bundled:austen"], tokenizer=load("bytes"), out=folder / "data", validation=0.03)
            steps = 160 if given.quick else given.steps
            runs = {} if given.alarms else runs_of_cases(folder, steps, quick=given.quick)
            if given.alarms or given.quick:
                runs |= runs_of_alarms(folder, given.alarms or 100, given.models)
            cases.finish(file, [*runs], partial(measured, folder, runs), workers=given.workers)
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


def faults_of(steps: int) -> Iterator[tuple[str, Fault]]:
    """Return the faults, which are the same in every run of the script."""
    draw = random.Random(21)
    for number in range(EACH):
        for kind in KINDS:
            step, place = draw.randrange(steps * 3 // 10, steps * 3 // 4), draw.random()
            match kind:
                case "poison":
                    fault = Fault(kind, step, draw.uniform(0.05, 1.0), LASTS)
                case "rate":
                    fault = Fault(kind, step, math.exp(draw.uniform(math.log(1.5), math.log(40))), LASTS)
                case _:
                    fault = Fault(kind, step, draw.randrange(26, 31), place=place)
            yield f"{kind} {number}", fault


def runs_of_cases(folder: Path, steps: int, *, quick: bool) -> dict[str, Run]:
    """Return the clean runs, and each case without and with responses, by name."""
    runs: dict[str, Run] = {f"clean {seed}": (spec_of(folder, steps, seed=seed), ()) for seed in SEEDS[: 1 if quick else None]}
    if quick:
        middle = steps * 5 // 8
        chosen = [("poison 0", Fault("poison", middle, 1.0, LASTS)), ("rate 0", Fault("rate", middle, 20.0, LASTS))]
    else:
        chosen = list(faults_of(steps))
    for name, fault in chosen:
        runs[f"{name} control"] = spec_of(folder, steps), (fault,)
        runs[f"{name} answered"] = spec_of(folder, steps, answers=ANSWERS), (fault,)
    return runs


def runs_of_alarms(folder: Path, steps: int, models: Sequence[str]) -> dict[str, Run]:
    return {f"alarms {model} {steps}": (varied(spec_of(folder, steps, model=model)), ()) for model in models}


def varied(spec: RunSpec) -> RunSpec:
    """Return the run with a growing batch and a change of the sequence length."""
    tables, train = spec.model_dump(exclude_unset=True), spec.train
    third = train.steps // 3 * train.global_batch
    tables["train"]["batch_ramp"] = [{"begin": third, "global_batch": 2 * train.global_batch}]
    tables["data"]["phases"] = [{"begin": 3 * third, "seq_len": train.seq_len // 2}]
    return RunSpec.model_validate(tables)


def measured(folder: Path, runs: dict[str, Run], name: str) -> dict[str, Any]:
    """Train a run in a process of its own; return the row's result."""
    (spec, faults), where = runs[name], folder / name.replace(" ", "-")
    try:
        (validation,) = run_ranks(_train, 1, spec, where, faults, timeout=2 * 3600.0)
    except RuntimeError as error:
        if "SpikeError" not in str(error) and "NotFinite" not in str(error):
            raise
        validation = float("inf")  # the run stopped
    told = list(read(where))
    steps = of_kind(told, Step) if name.startswith("alarms") else []
    numbers = {"losses": [_short(one.loss) for one in steps], "norms": [_short(one.grad_norm) for one in steps]}
    return {
        "validation": validation,
        "spikes": [asdict(one) for one in of_kind(told, Spike)],
        "skipped": len(of_kind(told, Skipped)),
        "rewound": [asdict(one) for one in of_kind(told, Rewound)],
        "fault": asdict(faults[0]) if faults else None,
        **(numbers if steps else {}),
    }


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def watched(losses: Sequence[float], norms: Sequence[float], spec: RunSpec) -> tuple[list[int], list[int]]:
    """Return the steps in which a run with these numbers notices a spike, and single steps outside a band, which are none."""
    history, phases, samples = History(), Phases.of(spec), 0
    noticed, single = list[int](), list[int]()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        phase, before = phases.at(samples), history.of_text(phases.texts[phases.at(samples).number])
        history = known_after(Update(), Vitals(loss, norm, step=step), stability=spec.stability, history=before)
        samples += phase.global_batch
        if history.outside and not before.outside:
            noticed.append(step + 1)
        if before.suspects and history.began < 0:
            single.append(step)
    return noticed, single


def _train(rank: int, spec: RunSpec, folder: Path, faults: tuple[Fault, ...]) -> float:
    folder.mkdir()
    return train(rank, spec, folder, faults, key=new()).validation


def print_table(file: Path) -> None:
    found = {one.case: one for one in (Ran(**row) for row in cases.kept(file))}
    clean = [one.validation for name, one in found.items() if name.startswith("clean")]
    if "clean 0" in found:
        noise = f", their spread {100 * stdev(clean) / mean(clean):.2f} %" if len(clean) > 1 else ""
        print(f"\nclean: validation loss {found['clean 0'].validation:.4f} (seed 0); {len(clean)} seeds{noise}")
        _print_cases(found, found["clean 0"].validation)
    for name, one in found.items():
        if name.startswith("alarms"):
            _, model, steps = name.split()
            spec = varied(spec_of(Path(), int(steps), model=model))
            noticed, single = watched(one.losses, one.norms, spec)
            print(
                f"{model}, {len(one.losses)} clean steps: {len(noticed)} false alarms {noticed}; single steps outside: {single}"
            )


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
