"""Compare every optimizer with AdamW on the same model and tokens, each after the same search; and compare large batches.

    megalith tokenizer train bundled:austen --vocab 4096 --out data/quickstart/tokenizer
    megalith data prepare bundled:austen --tokenizer data/quickstart/tokenizer --validation 0.05 --out data/quickstart/tokens
    python benchmarks/optimizers.py --file optimizers.jsonl
    python benchmarks/optimizers.py --file optimizers.jsonl --part batch
    python benchmarks/optimizers.py --quick

trains the model of recipes/quickstart.toml in one process, on its data and for as many tokens: 240 steps of 16 sequences, 40 of them
warm-up. With the first seed, the script searches five learning rates (factors of two) and two weight decays. The best setting is trained
with three other seeds. The table has each optimizer's final held-out loss, and the share of the tokens after which this loss was as low as
AdamW's final one. `!` marks a best rate at the edge of its grid.

`--part batch` does the same at eight times the batch and an eighth of the updates, for the same tokens: with AdamW, with LAMB, and with
AdamW and a batch that grows from one to eight times.

The file keeps finished runs, as benchmarks/cases.py says. A run takes about three minutes on an idle core. The first part has 78 runs and
the second 39; `--kinds muon,lion` trains some of them. `--device cuda --microbatch 16 --workers 6` is quicker on one GPU.
`--quick` searches two values with a small model on bytes, in a few seconds. benchmarks/results/optimizers.jsonl has the runs of
docs/performance.md.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import cases
from megalith.data.prepare import prepare
from megalith.data.tokenizer import load as load_tokenizer
from megalith.parallel.gradients import NotFinite
from megalith.prove.worlds import run_ranks
from megalith.spec.files import load
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.restore import Position, read_step
from megalith.train.step import train_step
from megalith.train.stream import open_stream
from megalith.train.validate import Validator

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("train.steps=240", "train.global_batch=16", "optimizer.warmup=40")
SEEDS = (1, 2, 3)  # the search uses seed 0
LOOKS = 24  # validations of a run
TIMES = 8  # the large batch, in batches of the recipe


class Grid(NamedTuple):
    """The values that an optimizer's search tries. `lr`: the middle of five rates, factors of two apart."""

    lr: float
    decays: tuple[float, float]
    more: Mapping[str, Any] = MappingProxyType({})


GRIDS = {
    "adamw": Grid(4e-3, (0.1, 0.01)),
    "muon": Grid(8e-3, (0.1, 0.01)),
    "lamb": Grid(1.6e-2, (0.1, 0.01), {"eps": 1e-6}),
    "lion": Grid(5e-4, (0.1, 1.0), {"beta2": 0.99}),
    "adafactor": Grid(4e-3, (0.1, 0.01)),
    "sgd": Grid(0.4, (0.0, 1e-3), {"momentum": 0.9}),
}
"""Kind -> grid, around the values in docs/guide/optimizers.md and in the papers named there."""
LARGE = {"adamw": GRIDS["adamw"], "lamb": GRIDS["lamb"]._replace(lr=3.2e-2), "ramp": GRIDS["adamw"]}
"""The grids of `--part batch`. Rates grow roughly with the square root of the batch."""


class Case(NamedTuple):
    """Settings of one run."""

    part: str
    kind: str
    lr: float
    decay: float
    seed: int


@dataclass(frozen=True)
class Ran:
    """Result of a run. `curve`: (share of the tokens, held-out loss), the last one at the end."""

    case: list[Any]
    curve: list[tuple[float, float]]
    commit: str
    machine: str

    @property
    def loss(self) -> float:
        """The held-out loss at the end; infinite if the run stopped."""
        return self.curve[-1][1] if self.curve and self.curve[-1][0] == 1.0 else math.inf


@dataclass(frozen=True)
class Search:
    """The runs of one part. `rates`: the powers of two of the rates that are tried, relative to the middle one."""

    spec: RunSpec
    part: str
    rates: Sequence[int]
    decays: int
    seeds: Sequence[int]
    microbatch: int = 4

    @property
    def grids(self) -> dict[str, Grid]:
        """The optimizers of this part."""
        return LARGE if self.part == "batch" else GRIDS

    def first(self, kind: str) -> list[Case]:
        """Return the runs of one optimizer's search."""
        grid = self.grids[kind]
        return [
            Case(self.part, kind, grid.lr * 2.0**power, decay, 0) for power in self.rates for decay in grid.decays[: self.decays]
        ]

    def others(self, best: Case) -> list[Case]:
        """Return the best run of the search with other seeds."""
        return [best._replace(seed=seed) for seed in self.seeds]

    def spec_of(self, case: Case) -> RunSpec:
        """Return the run file's table for a case."""
        grid, tables = self.grids[case.kind], self.spec.model_dump(exclude_unset=True)
        kind = "adamw" if case.kind == "ramp" else case.kind
        tables["plan"] = {"microbatch": self.microbatch}
        tables["optimizer"] |= {"kind": kind, "lr": case.lr, "weight_decay": case.decay, **grid.more}
        tables["train"] |= {"seed": case.seed}
        if case.part == "batch":
            _enlarge(tables, ramp=case.kind == "ramp")
        steps = RunSpec.model_validate(tables).train.steps
        tables["validation"] = tables.get("validation", {}) | {"every": max(1, steps // LOOKS)}
        return RunSpec.model_validate(tables)


def _enlarge(tables: dict[str, Any], *, ramp: bool) -> None:
    """Return settings with eight times the batch, at equal tokens. A ramp doubles the batch at a tenth, a fifth and two
    fifths of the tokens."""
    train, optimizer = tables["train"], tables["optimizer"]
    batch, before = train["global_batch"], train["steps"]
    if ramp:
        tenth = before // (10 * TIMES) * batch * TIMES  # whole steps of the largest batch
        begins = [0, tenth, 2 * tenth, 4 * tenth, batch * before]
        sizes = [batch << power for power in range(len(begins) - 1)]
        train["batch_ramp"] = [{"begin": begin, "global_batch": size} for begin, size in zip(begins[1:], sizes[1:], strict=False)]
        train["steps"] = sum((end - begin) // size for (begin, end), size in zip(pairwise(begins), sizes, strict=True))
    else:
        train |= {"global_batch": batch * TIMES, "steps": before // TIMES}
    optimizer["warmup"] = max(1, optimizer["warmup"] * train["steps"] // before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="where finished runs are kept; default: nowhere")
    parser.add_argument("--data", default="data/quickstart/tokens")
    parser.add_argument("--part", choices=("optimizers", "batch"), default="optimizers")
    parser.add_argument("--kinds", default="", help="names of optimizers, with commas; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--microbatch", type=int, default=4)
    cases.add_arguments(parser, device=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and train nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)  # ranks are forked: see `run_ranks`
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = given.file or folder / "optimizers.jsonl"
        for part in ("optimizers", "batch") if given.quick else (given.part,):
            search = quick(part, folder) if given.quick else full(part, given.data, given.microbatch)
            if not given.table:
                kinds = [kind for kind in search.grids if not given.kinds or kind in given.kinds.split(",")]
                measure = partial(measured, search, 1 if given.quick else given.threads, given.device)
                run_all(file, search, kinds, partial(cases.finish, measure=measure, workers=given.workers, device=given.device))
            print_search(kept(file), search)
            print_table(kept(file), search)


def full(part: str, data: str, microbatch: int = 4) -> Search:
    """Return the quickstart's settings."""
    spec = load(ROOT / "recipes/quickstart.toml", overrides=[f"data.path={data}", *SETTINGS]).spec
    return Search(spec, part, rates=range(-2, 3), decays=2, seeds=SEEDS, microbatch=microbatch)


def quick(part: str, folder: Path) -> Search:
    """Return settings of a small model on bytes: two rates, one decay, one other seed."""
    if not (folder / "data").exists():
        prepare(["bundled:austen"], tokenizer=load_tokenizer("bytes"), out=folder / "data", validation=0.03)
    model = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 260, "context": 64}
    tables = {
        "model": model,
        "data": {"path": str(folder / "data")},
        "train": {"steps": 80, "global_batch": 4, "seq_len": 32, "precision": "fp32"},
        "optimizer": {"lr": 1e-3, "warmup": 8},
        "validation": {"samples": 16},
    }
    return Search(RunSpec.model_validate(tables), part, rates=(-1, 0), decays=1, seeds=SEEDS[:1])


def run_all(file: Path, search: Search, kinds: Sequence[str], finish: Callable[[Path, Sequence[Case]], object]) -> None:
    """Search, then train the best with other seeds."""
    finish(file, [case for kind in kinds for case in search.first(kind)])
    found = kept(file)
    finish(file, [case for kind in kinds for case in search.others(best_of(found, search, kind))])


def best_of(found: dict[Case, Ran], search: Search, kind: str) -> Case:
    """Return the case of the search with the lowest final held-out loss."""
    return min(search.first(kind), key=lambda case: found[case].loss)


def measured(search: Search, threads: int, device: str, case: Case) -> dict[str, Any]:
    """Train a case in a process of its own; return the row's result."""
    (curve,) = run_ranks(train, 1, search.spec_of(case), threads, device, timeout=2 * 3600.0)
    return {"curve": curve}


def train(rank: int, spec: RunSpec, threads: int, kind: str) -> list[tuple[float, float]]:
    """Train; return (share of the tokens, held-out loss) at each validation. Training ends early if numbers are not finite."""
    torch.set_num_threads(threads)
    device, phases, samples = torch.device(kind), Phases.of(spec), 0
    trainer, stream = assemble(spec, groups=mesh_groups(spec, device), device=device), open_stream(spec, "train")
    validator = Validator(trainer, open_stream(spec, "validation"))
    sizes = list(batches(spec, phases))
    curve = list[tuple[float, float]]()
    for step, size in enumerate(sizes):
        trainer.enter(phases.at(samples))
        try:
            train_step(trainer, read_step(stream, spec, Position(), step, 0), step=step)
        except NotFinite:
            return curve
        samples += size
        if (step + 1) % spec.validation.every == 0 or step + 1 == len(sizes):
            curve.append((samples / sum(sizes), validator.run()[0]))
    return curve


def batches(spec: RunSpec, phases: Phases) -> Iterator[int]:
    """The samples of each step."""
    samples = 0
    for _ in range(spec.train.steps):
        yield (size := phases.at(samples).global_batch)
        samples += size


def kept(file: Path) -> dict[Case, Ran]:
    """Return the finished runs of a file."""
    return {Case(*ran.case): ran for ran in (Ran(**row) for row in cases.kept(file))}


def reached(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Return the share of the tokens after which the held-out loss was at most `loss`, interpolated between validations; infinite
    if never."""
    for (share, above), (after, below) in pairwise(curve):
        if above > loss >= below:
            return share + (after - share) * (above - loss) / (above - below)
    return curve[0][0] if curve and curve[0][1] <= loss else math.inf


def print_search(found: dict[Case, Ran], search: Search) -> None:
    """Print the held-out losses of the search, and after which share of the tokens each optimizer's best was as low as AdamW's best."""
    searched = [kind for kind in search.grids if all(case in found for case in search.first(kind))]
    goal = min((found[case].loss for case in search.first("adamw") if case in found), default=math.inf)
    for kind in searched:
        print(f"\n{kind}, seed 0: held-out loss by learning rate and weight decay")
        for lr in dict.fromkeys(case.lr for case in search.first(kind)):
            losses = (f"{case.decay:>6g}: {found[case].loss:.4f}" for case in search.first(kind) if case.lr == lr)
            print(f"{lr:>8.3g}  {'  '.join(losses)}")
        print(
            f"as low as the best of adamw after {100 * reached(found[best_of(found, search, kind)].curve, goal):.0f} % of the tokens"
        )


def print_table(found: dict[Case, Ran], search: Search) -> None:
    """Print the table of a part from the file."""
    searched = [kind for kind in search.grids if all(case in found for case in search.first(kind))]
    losses = dict[str, list[float]]()
    print(f"\n{'kind':10} {'lr':>8} {'decay':>6}  held-out loss (spread of its seeds)   tokens to adamw's")
    for kind in searched:
        best, grid = best_of(found, search, kind), search.grids[kind]
        mine = [found[case] for case in search.others(best) if case in found]
        if not mine:
            continue
        losses[kind] = [one.loss for one in mine]
        ends = {grid.lr * 2.0**power for power in (search.rates[0], search.rates[-1])}
        spread = f" (+-{stdev(losses[kind]):.4f})" if len(mine) > 1 else ""
        row = f"{kind:10} {best.lr:>8.3g}{'!' if best.lr in ends else ' '}{best.decay:>6g}  {mean(losses[kind]):.4f}{spread}"
        if "adamw" in losses and kind != "adamw":
            shares = [reached(one.curve, mean(losses["adamw"])) for one in mine]
            row = f"{row:56} {100 * mean(shares):.0f} %" if math.isfinite(mean(shares)) else f"{row:56} never"
        print(row)


if __name__ == "__main__":
    main()
