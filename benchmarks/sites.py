"""Compare validation loss and bytes of runs across sites with data parallelism, on the same tokens and over real loopback connections.

    megalith data prepare bundled:austen --tokenizer bytes --validation 0.03 --out data/austen-bytes
    python benchmarks/sites.py --data data/austen-bytes
    python benchmarks/sites.py --data data/austen-bytes --size 6.5M --steps 2000 --seeds 3 --out sites.jsonl
    python benchmarks/sites.py --data data/austen-bytes --study --out sites.jsonl       # three sizes and seeds, for days
    python benchmarks/sites.py --quick                                                  # a fiftieth of its steps

The loss is that of the merged weights on held-out text, after the final merge. Gaps are relative to data parallelism, or to the same method
with 32 bits, for each seed. Bytes are those that a site sends for each token it trains. For merges they are counted, with scales and
headers. For data parallelism they are the least that two sites can exchange: one fp32 number for each parameter in each step. Three cases
have a planted fault, which must show: differences with the wrong sign, no error feedback, and eager steps of which only half is corrected.
The file keeps finished cases, as benchmarks/cases.py says.

The study trains STUDY in three sizes with three seeds, after a search at the smallest size for each method's outer rate and momentum. Runs
with fewer bits, or with a fault, take the settings found for the method itself. At its start the study times a step of each size and
optimizer, and prints how many cases are left and how long they will take.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import cases
from megalith.fleet.secure import key
from megalith.parallel.groups import group_of
from megalith.prove.worlds import run_ranks
from megalith.spec import files
from megalith.spec.run import RunSpec
from megalith.spec.sites import folder_of
from megalith.spec.sizes import count_model
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.restore import Position, read_portion, read_step
from megalith.train.sites import outer
from megalith.train.sites.meet import build
from megalith.train.step import train_step
from megalith.train.stream import open_stream
from megalith.train.validate import Validator

MUON = {"kind": "muon", "iteration": "fp32"}
STREAMING = {"fragments": 3, "overlap": 5}
SPARSE = {"top_k": 64, "bits": 2, "lr": 1.0, "momentum": 0.0, "feedback_decay": 0.95}


class Case(NamedTuple):
    """A method. `sites`: None for data parallelism. `beside`: the case with whose loss this one is compared. `fault`: a planted
    fault."""

    sites: dict[str, Any] | None
    optimizer: Mapping[str, Any] = MappingProxyType({})
    beside: str = "data parallelism"
    fault: str = ""


CASES = {
    "data parallelism": Case(None),
    "DiLoCo": Case({}),
    "streaming": Case(STREAMING),
    "streaming, 4 bits": Case(STREAMING | {"bits": 4}, beside="streaming"),
    "eager": Case(STREAMING | {"eager": True}, beside="streaming"),
    "eager, 4 bits": Case(STREAMING | {"bits": 4, "eager": True}, beside="eager"),
    "top-k, 2 bits": Case(SPARSE, beside="DiLoCo"),
    "top-k, 2 bits, streaming": Case(SPARSE | STREAMING, beside="top-k, 2 bits"),
    "data parallelism, Muon": Case(None, MUON),
    "Muon": Case({}, MUON, "data parallelism, Muon"),
    "Muon, 2 bits": Case({"bits": 2}, MUON, "Muon"),
    "fault: Muon, 2 bits, no feedback": Case({"bits": 2, "error_feedback": False}, MUON, "Muon"),
    "fault: DiLoCo, wrong sign": Case({}, fault="sign"),
    "fault: eager, half a correction": Case(STREAMING | {"eager": True}, beside="eager", fault="half"),
}
ROOT = Path(__file__).parents[1]
QUICKSTART = "quickstart"
SIZES = {"0.1M": (64, 2), "1.5M": (128, 7), "6.5M": (256, 8), "7.5M": (320, 6), "25M": (512, 8), QUICKSTART: None}
"""Approximate number of parameters -> width and number of blocks; None: the model of recipes/quickstart.toml."""
BATCH, LENGTH = 16, 64
GRACE = 3600.0
"""Seconds for which a merge waits for a site: on a busy machine the other site would be left out after the default, a few seconds, and
the case would fail."""
STUDY = (
    "data parallelism", "DiLoCo", "streaming", "streaming, 4 bits", "data parallelism, Muon", "Muon", "Muon, 2 bits",
    "fault: Muon, 2 bits, no feedback", "fault: DiLoCo, wrong sign",
)  # fmt: skip
"""The cases of the study."""


class Study(NamedTuple):
    """The extent of the study. `rates`, `momenta`: outer settings that are tried at the first of the sizes."""

    sizes: tuple[str, ...] = ("1.5M", "6.5M", "25M")
    steps: int = 600
    inner_steps: int = 30
    seeds: int = 3
    rates: tuple[float, ...] = (0.5, 0.7, 1.0)
    momenta: tuple[float, ...] = (0.6, 0.8, 0.9)


QUICK = Study(sizes=("0.1M", "1.5M"), steps=12, inner_steps=6, seeds=1, rates=(0.7, 1.0), momenta=(0.9,))
At = tuple[Any, ...]  # name, size, steps, inner steps, seed, and for searched settings the outer rate and momentum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="needed, but for --quick")
    parser.add_argument("--study", action="store_true", help="three sizes and seeds, with a search for outer settings")
    parser.add_argument("--quick", action="store_true", help="the study with few steps of small models, on data of its own")
    parser.add_argument("--size", choices=SIZES, default="0.1M")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--inner-steps", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=CASES, action="append", help="a case, with those it is compared with; default: all")
    parser.add_argument("--out", "--file", type=Path, default=None, help="where finished cases are kept; default: nowhere")
    cases.add_arguments(parser, device=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        with cases.own_data() as data:
            _study(QUICK, given, str(data))
        return
    if given.data is None:
        parser.error("name the prepared data with --data")
    if given.study:
        _study(Study(), given, given.data)
        return
    names = _with_references(given.only) if given.only else [*CASES]
    like = (given.size, given.steps, given.inner_steps)
    wanted = [(name, *like, seed) for seed in range(given.seeds) for name in names]
    measure = partial(measured, given.data, given.device)
    rows = cases.finish(given.out, wanted, measure, workers=given.workers, device=given.device)
    same = [row for row in rows if row["case"][1:4] == [*like] and len(row["case"]) == 5]
    print(_extent(given.size, given.data, given.steps, given.inner_steps))
    _show(names, {(row["case"][0], row["case"][4]): row for row in same}, given.seeds)


def _study(study: Study, given: argparse.Namespace, data: str) -> None:
    """Search at the smallest size, train all sizes and seeds, and print a table of each size."""
    _foretell(study, cases.kept(given.out), data, given)
    finish = partial(cases.finish, measure=partial(measured, data, given.device), workers=given.workers, device=given.device)
    rows = finish(given.out, searches(study))
    best = chosen(study, rows)
    for name, (rate, momentum) in best.items():
        print(f"{name}: outer rate {rate:g} and momentum {momentum:g}")
    wanted = [at_best(study, best, name, size, seed) for seed in range(study.seeds) for size in study.sizes for name in STUDY]
    if given.out is None:
        kept = [row for row in rows if tuple(row["case"]) in wanted]
        rows = kept + finish(None, [at for at in wanted if [*at] not in [row["case"] for row in kept]])
    else:
        rows = finish(given.out, wanted)
    for size in study.sizes:
        print(f"\n{_extent(size, data, study.steps, study.inner_steps)}, {study.seeds} seeds")
        mine = [row for row in rows if row["case"][1] == size and tuple(row["case"]) in wanted]
        _show(STUDY, {(row["case"][0], row["case"][4]): row for row in mine}, study.seeds)


def _foretell(study: Study, rows: Sequence[Mapping[str, Any]], data: str, given: argparse.Namespace) -> None:
    """Print how many cases are left, and the hours that they take."""
    missing = left(study, rows)
    seconds = dict[tuple[str, str], float]()
    for name, size in {_kind(at): (at[0], at[1]) for at in missing}.values():
        name = "data parallelism, Muon" if CASES[name].optimizer else "data parallelism"
        spec = run_of(name, data, size, study.steps, study.inner_steps, 0)
        seconds[_kind((name, size))] = run_ranks(_timed, 1, spec, torch.device(given.device), timeout=3600.0)[0]
    if missing:
        steps = ", ".join(f"{size} {optimizer} {each:.2g} s" for (size, optimizer), each in seconds.items())
        of = "processor time" if given.device == "cpu" else "one GPU"
        words = f"{len(missing)} cases left: about {hours(missing, seconds):,.3g} hours of {of}, without merges and validation"
        print(f"{words}. A step takes: {steps}", file=sys.stderr, flush=True)


def left(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[At]:
    """Return the cases that `rows` lack. The cases whose outer settings are still searched count with those that are tried first."""
    done = {tuple(row["case"]) for row in rows}
    searched = searches(study)
    best = chosen(study, rows) if done.issuperset(searched) else {at[0]: (at[5], at[6]) for at in reversed(searched)}
    then = [at_best(study, best, name, size, seed) for seed in range(study.seeds) for size in study.sizes for name in STUDY]
    return [at for at in dict.fromkeys([*searched, *then]) if at not in done]


def hours(wanted: Sequence[At], seconds: Mapping[tuple[str, str], float]) -> float:
    """Return the hours of some cases. `seconds`: of a step, by size and optimizer."""
    return sum(at[2] * seconds[_kind(at)] for at in wanted) / 3600


def _kind(at: At) -> tuple[str, str]:
    """Return the size and the optimizer of a case, on which the time of its steps depends."""
    return at[1], str(CASES[at[0]].optimizer.get("kind", "adamw"))


def _timed(rank: int, spec: RunSpec, device: torch.device) -> float:
    """Return the seconds of a step of the whole batch, on CPUs in processor time: the second of two, since the first allocates memory."""
    assert dist.group.WORLD is not None
    trainer = assemble(spec, groups=mesh_groups(spec, device, group_of(dist.group.WORLD, [rank])), device=device)
    stream, clock = open_stream(spec, "train"), time.process_time if device.type == "cpu" else time.perf_counter
    began = clock()
    for step in range(2):
        began = clock()
        train_step(trainer, read_step(stream, spec, Position(), step, 0), step=step)
    return clock() - began


def method_of(name: str) -> str:
    """Return the case whose search gives the outer settings of a case with sites: the same method, whole and without a fault."""
    case = CASES[name]
    plain = {key: value for key, value in (case.sites or {}).items() if key not in ("bits", "error_feedback")}
    alike = (other for other, one in CASES.items() if one.sites == plain and one.optimizer == case.optimizer and not one.fault)
    return next(alike)


def searches(study: Study) -> list[At]:
    """Return the cases of the search."""
    like = (study.sizes[0], study.steps, study.inner_steps, 0)
    methods = dict.fromkeys(method_of(name) for name in STUDY if CASES[name].sites is not None)
    return [(name, *like, rate, momentum) for name in methods for rate in study.rates for momentum in study.momenta]


def chosen(study: Study, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the outer rate and momentum with the lowest loss of each method."""
    losses = {tuple(row["case"]): row["loss"] for row in rows}
    best: dict[str, At] = {}
    for at in searches(study):
        if at[0] not in best or losses[at] < losses[best[at[0]]]:
            best[at[0]] = at
    return {name: (at[5], at[6]) for name, at in best.items()}


def at_best(study: Study, best: Mapping[str, tuple[float, float]], name: str, size: str, seed: int) -> At:
    """Return a case of the study with the outer settings that the search found."""
    outer = () if CASES[name].sites is None else best[method_of(name)]
    return (name, size, study.steps, study.inner_steps, seed, *outer)


def _with_references(names: Sequence[str]) -> list[str]:
    """Return cases and all those that they are compared with, in the order of CASES."""
    found = {*names, "data parallelism"}
    while more := {CASES[name].beside for name in found} - found:
        found |= more
    return [name for name in CASES if name in found]


def measured(data: str, device: str, at: At) -> dict[str, float]:
    """Train a case; return its loss, and the bytes that a site sends for each of its own tokens."""
    name, size, steps, inner_steps, seed, *outer = at
    spec = run_of(name, data, size, steps, inner_steps, seed, dict(zip(("lr", "momentum"), outer, strict=False)))
    count = spec.sites.count if spec.sites is not None else 1
    with tempfile.TemporaryDirectory() as folder:
        how = (CASES[name].fault, folder, key.new().text, torch.device(device))
        found: Sequence[tuple[float, int, int]] = run_ranks(train, count, spec, *how, timeout=cases.LONGEST_SECONDS)
    loss, sent, parameters = found[0]
    sites = count if spec.sites is not None else 2
    sent = sent if spec.sites is not None else 4 * parameters * spec.train.steps
    return {"loss": loss, "bytes": sent / (spec.train.steps * BATCH * LENGTH / sites)}


def run_of(
    name: str, data: str, size: str, steps: int, inner_steps: int, seed: int, outer: Mapping[str, float] = MappingProxyType({})
) -> RunSpec:
    """Return the run of a case. `outer`: settings of the outer optimizer."""
    case = CASES[name]
    given = {"count": 2, "inner_steps": inner_steps, "grace": GRACE} | (case.sites or {}) | dict(outer)
    sites = {} if case.sites is None else {"sites": given}
    return RunSpec.model_validate(
        {
            "model": model_of(size),
            "data": {"path": data},
            "train": {"steps": steps, "global_batch": BATCH, "seq_len": LENGTH, "precision": "fp32", "seed": seed},
            "optimizer": {"lr": 1e-3, "warmup": max(1, steps // 10), **case.optimizer},
            "validation": {"every": steps, "samples": 64},
        }
        | sites
    )


def model_of(size: str) -> Mapping[str, Any]:
    """Return the table `[model]` of a size: a small Llama."""
    if (shape := SIZES[size]) is None:
        return files.load(ROOT / "recipes" / "quickstart.toml").spec.model.model_dump()
    dim, layers = shape
    model = {"dim": dim, "layers": layers, "heads": dim // 16, "kv_heads": dim // 32, "head_dim": 16, "ffn": 3 * dim}
    return model | {"vocab": 260, "context": LENGTH}


def parameters(spec: RunSpec) -> int:
    """Return the number of parameters of a run's model."""
    return count_model(spec.model.build()).total


def _extent(size: str, data: str, steps: int, inner_steps: int) -> str:
    """Describe the runs of a table."""
    exact = parameters(run_of("DiLoCo", data, size, steps, inner_steps, 0))
    return f"{size}: {exact:,} parameters, {steps} steps, inner_steps = {inner_steps}"


def train(rank: int, spec: RunSpec, fault: str, folder: str, secret: str, device: torch.device) -> tuple[float, int, int]:
    """Train as the only rank of a site, or of a run without sites. Return the merged weights' loss, the bytes sent and the
    number of parameters."""
    os.environ[key.VARIABLE] = secret
    assert dist.group.WORLD is not None
    inner = group_of(dist.group.WORLD, [rank])
    if spec.sites is not None:
        spec = spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": rank})})
    trainer = assemble(spec, groups=mesh_groups(spec, device, inner), device=device)
    sent = _train_site(trainer, folder_of(Path(folder), rank), fault) if spec.sites is not None else _train_alone(trainer)
    loss, _ = Validator(trainer, open_stream(spec, "validation")).run()
    return loss, sent, sum(parameter.numel() for parameter in trainer.parameters.values())


def _train_alone(trainer: Trainer) -> int:
    stream = open_stream(trainer.run, "train")
    for step in range(trainer.run.train.steps):
        train_step(trainer, read_step(stream, trainer.run, Position(), step, 0), step=step)
    return 0


def _train_site(trainer: Trainer, folder: Path, fault: str) -> int:
    """Train a site to the end; return the bytes that it has sent in merges."""
    if fault == "sign":
        found = outer.difference
        outer.difference = lambda anchor, weight, feedback: found(weight, anchor, feedback)  # type: ignore[assignment]
    if fault == "half":
        outer.correct = lambda weight, anchor, early: weight.add_((anchor - early) / 2)
    folder.mkdir(exist_ok=True)
    stream, sites = open_stream(trainer.run, "train"), build(trainer, folder, beat=lambda: None)
    sites.state.begin()
    sites.begin([])
    sent = step = 0
    while sites.left:
        turn = sites.deal(step)
        assert turn.share is not None
        microbatches = read_portion(stream, trainer.run, turn.share, 0)
        sites.note(train_step(trainer, microbatches, step=step).loss)
        step += 1
        sent += sum(event.bytes_sent for event in sites.after_step(step, stop=False).made)
    sites.close()
    return sent


def _show(names: Sequence[str], rows: dict[tuple[str, int], dict[str, Any]], seeds: int) -> None:
    """Print for each case the loss, the gap to its reference with its standard error, and how many times fewer bytes a token takes than
    under data parallelism with gradients in fp32 and in bf16."""
    print(f"{'case':34s} loss    gap                   bytes a token  fewer than fp32  than bf16")
    for name in names:
        case = CASES[name]
        mine = [rows[name, seed] for seed in range(seeds)]
        gaps = [100 * (row["loss"] / rows[case.beside, seed]["loss"] - 1) for seed, row in enumerate(mine)]
        error = f" +- {statistics.stdev(gaps) / seeds**0.5:.2f}" if seeds > 1 else ""
        gap = "" if name == case.beside else f"{statistics.mean(gaps):+.2f}{error} %"
        fewer = rows["data parallelism", 0]["bytes"] / mine[0]["bytes"]
        loss = statistics.mean(row["loss"] for row in mine)
        print(f"{name:34s} {loss:.4f}  {gap:20s}  {mine[0]['bytes']:13.2f}  {fewer:13.1f} x  {fewer / 2:7.1f} x")


if __name__ == "__main__":
    main()
