"""What the program can do, one function each: the table of contents. `cli` parses arguments for these and prints what they give.

Parts that need torch, or take long to import, are imported by the verb that uses them, so that each command starts fast.
"""

import importlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megalith.check import Case, check_resume
from megalith.check import check as find_problems
from megalith.checkpoint.folder import committed
from megalith.spec import files
from megalith.spec.files import Resolved
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec
from megalith.spec.sizes import count_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megalith.control.outcome import Outcome
    from megalith.cost.foreseen import Line
    from megalith.data.manifest import Manifest
    from megalith.fleet.engines import Artefact
    from megalith.fleet.environment import Place
    from megalith.fleet.job import Job
    from megalith.fleet.tiers import Copy
    from megalith.machine.health import Finding
    from megalith.planner.answer import Answer
    from megalith.planner.asked import Question
    from megalith.planner.atlas import Atlas
    from megalith.planner.price import Price
    from megalith.prove.dryrun import DryRun
    from megalith.rehearse.campaign import Ran
    from megalith.rehearse.judge import Aims, Judgement
    from megalith.rehearse.prepare import Prepared, Wanted
    from megalith.rehearse.replay import Replayed
    from megalith.rehearse.scenario import Scenario
    from megalith.rehearse.simulate import Simulated, Tried

TRAIN = "megalith.train.run:main"
"""What each rank of a training calls."""

PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo")
"""What every rank needs besides its entry: imported once, before they are forked."""


@dataclass(frozen=True)
class Checked:
    """A run and everything found in it."""

    resolved: Resolved
    problems: list[Problem]

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]


@dataclass(frozen=True)
class Dried:
    """What one rank of a run would hold, send and compute, and the same as the planner's figures foresee it. `limit`: bytes of the
    cluster's device, None where not known."""

    run: "DryRun"
    lines: "tuple[Line, ...]"
    limit: int | None
    problems: list[Problem]


@dataclass(frozen=True)
class Trained:
    """How a training run ended. `code` is the exit status (`fleet.exit_codes`), `message` what a person should read.

    `report` is None where none could be written, and on all ranks but the first, which also have nothing to say.
    """

    run_dir: Path
    code: int
    message: str
    report: Path | None


def check(path: Path, *, overrides: Sequence[str] = (), world: int | None = None, run_dir: Path | None = None) -> Checked:
    """Read a run file and find everything that is wrong with it, or unwise. Raises SpecErrors, with all of that, when it cannot be read
    as a run.

    `run_dir` is where it is kept (default: runs/NAME): a run that is there already does not need what only a first start does.
    """
    return _examine(path, overrides=overrides, world=world, run_dir=run_dir)


def train(
    path: Path,
    *,
    console: Console,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    profile: str | None = None,
) -> Trained:
    """Train what a run file describes, or go on with the run that `run_dir` (default: runs/NAME) holds.

    Under torchrun or Slurm this process becomes its rank; else the ranks are started on this machine, and `console` shows
    how they get on. `profile` = "A:B": torch.profiler traces steps A to B - 1. Raises SpecErrors before anything starts.
    """
    from megalith.fleet import environment  # only commands with ranks ask who started them

    place = environment.find()
    _end_with_torchrun(place)
    checked = check(path, overrides=overrides, world=place.world if place else None, run_dir=run_dir)
    folder = _folder(run_dir, checked.resolved.spec)
    problems = [*checked.errors, *_other_run(checked.resolved, folder), *([] if place else _too_many(checked.resolved.spec))]
    if problems:
        raise SpecErrors(problems)
    if place is None or place.local_rank == 0:
        _admit(checked.resolved.spec, folder)
    arguments = {"run_dir": str(folder.resolve())} | ({"profile": profile} if profile else {})
    entry = TRAIN
    if place is not None and place.rank > 0:
        return Trained(folder, _join(checked.resolved, folder, place, entry, arguments), "", None)
    from megalith.report.live import Follow  # drawing, for the one process that people watch

    with Follow(folder, checked.resolved.spec.train.steps, console) as follow:
        if place is None:
            outcome = _start(checked.resolved, folder, entry, arguments, tick=follow.poll, recover=True)
            code, message = outcome.code, outcome.message()
        else:
            with _called_often(follow.poll):
                code = _join(checked.resolved, folder, place, entry, arguments)
            message = f"ended with status {code}" if code else "finished"
    return Trained(folder, code, message, _report(folder))


def agent(
    path: Path, *, console: Console, overrides: Sequence[str] = (), run_dir: Path | None = None, machine: str | None = None
) -> Trained:
    """Be one machine of a run on many, under the name `machine` (default: the machine's own): with ranks of its own, or warm as a spare.

    The process that the engine calls the first also directs the run, and shows it on `console`. Raises what `train` raises, ValueError
    where nothing says how to meet the others, TimeoutError when too few of them come.
    """
    from megalith.fleet import environment  # only commands with ranks ask who started them
    from megalith.report.live import Follow  # drawing, for the one process that people watch
    from megalith.train import agents  # needs torch

    place = environment.find()
    _end_with_torchrun(place)
    checked = check(path, overrides=overrides, run_dir=run_dir)
    spec = checked.resolved.spec
    folder = _folder(run_dir, spec)
    if problems := [*checked.errors, *_other_run(checked.resolved, folder)]:
        raise SpecErrors(problems)
    job = _job(spec, folder.resolve(), TRAIN, {"run_dir": str(folder.resolve())})
    host = agents.Host(job, spec.fleet, agents.own_name(machine), _identity(spec), lambda: agents.open_data(spec))
    if not agents.directs(place):
        return Trained(folder, agents.serve_node(host, place), "", None)
    assert place is not None  # else it would not direct
    _admit(spec, folder)
    files.save(checked.resolved, folder)
    with Follow(folder, spec.train.steps, console) as follow:
        outcome = agents.direct(host, place, checkpoints=lambda: _checkpoints(folder), tick=follow.poll)
    return Trained(folder, outcome.code, outcome.message(), _report(folder))


def parity(path: Path, *, overrides: Sequence[str] = (), steps: int = 3, run_dir: Path | None = None) -> dict[str, Any]:
    """Train a small model under the run's plan and in one process, and compare: `{"equal", "rows": [...], "model", "steps"}`.

    Ranks are started as by `train`; their folder is `run_dir` (default: runs/NAME-parity). The run's data is not needed.
    Raises SpecErrors for a plan that is not legal, RuntimeError with the first cause when a rank fails.
    """
    from megalith.fleet import environment  # only commands with ranks ask who started them

    place = environment.find()
    checked = _examine(path, overrides=overrides, world=place.world if place else None, look=False)
    if checked.errors:
        raise SpecErrors(checked.errors)
    resolved = checked.resolved
    folder = run_dir or Path("runs") / f"{resolved.spec.name}-parity"
    arguments = {"run_dir": str(folder.resolve()), "steps": steps}
    result, entry = folder / "parity.json", "megalith.prove.parity:main"
    if place is not None:
        if status := _join(resolved, folder, place, entry, arguments):
            raise RuntimeError(f"this rank ended with status {status}: see the errors of all ranks")
    else:
        result.unlink(missing_ok=True)
        outcome = _start(resolved, folder, entry, arguments, tick=None)
        if outcome.code:
            raise RuntimeError(outcome.message())
    return json.loads(result.read_text(encoding="utf-8"))


def parity_of_draws(
    count: int,
    *,
    seed: int = 0,
    starting: Callable[[str, int], None] = lambda name, ranks: None,
    ended: Callable[[str], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Prove `count` combinations of parallelisms, drawn such that soon every pair of choices occurs: `{"equal", "asked", "seed",
    "outcomes", "cases": [...]}`.

    `starting` hears the name and ranks of each before it runs, `ended` how it went. All is equal if as many as were asked for are: a
    tie counts for nothing.
    """
    from megalith.prove import prove

    cases: list[dict[str, Any]] = []
    outcomes = {"equal": 0, "tie": 0, "NOT equal": 0, "failed": 0}
    for proof in prove.prove_drawn(count, seed, starting=lambda one: starting(one.name, one.spec.plan.ranks)):
        outcomes[proof.outcome] += 1
        rows = [asdict(row) | {"equal": row.equal} for row in proof.rows]
        known = {"name": proof.draw.name, "choices": dict(proof.draw.choices), "ranks": proof.draw.spec.plan.ranks}
        cases.append({**known, "outcome": proof.outcome, "tokens_tied": proof.tokens_tied, "rows": rows, "error": proof.error})
        ended(proof.outcome)
    return {"equal": outcomes["equal"] == count, "asked": count, "seed": seed, "outcomes": outcomes, "cases": cases}


def dryrun(path: Path, *, overrides: Sequence[str] = (), world: int | None = None, rank: int = 0) -> Dried:
    """Count what rank `rank` of the run would hold, send and compute in a step, without the other ranks and without data.

    `world` is the number of ranks there will be, to compare with the plan. Raises SpecErrors for a plan that is not legal and for a rank
    that the plan has not.
    """
    from megalith.spec import cluster  # no torch, but only this and training ask what a device is

    checked = _examine(path, overrides=overrides, world=world, look=False)
    spec, errors = checked.resolved.spec, checked.errors
    if not 0 <= rank < spec.plan.ranks:
        last = spec.plan.ranks - 1
        errors.append(Problem("error", "--rank", rank, f"the plan has ranks 0 to {last}", f"Use --rank 0 to {last}."))
    if errors:
        raise SpecErrors(errors)
    limit = None if spec.cluster == "local" else cluster.load(spec.cluster).accelerator.memory
    from megalith.cost.foreseen import foresee, of_run  # only this compares
    from megalith.planner.beside import beside
    from megalith.prove import dryrun, fits

    lines = foresee(of_run(spec), rank=rank)
    run = dryrun.dryrun(spec, rank=rank)
    problem = fits.does_not_fit(spec, run.counted.memory, limit) if limit else None
    return Dried(run, beside(lines, run.counted), limit, [problem] if problem else [])


def generate(
    run_dir: Path,
    *,
    prompt: str,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    greedy: bool = False,
    step: int | None = None,
) -> str:
    """Text the trained model writes after `prompt`."""
    from megalith.train import generate as writer  # needs torch

    chosen = {"temperature": 0.0 if greedy else temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    return writer.generate(run_dir, prompt, tokens=tokens, step=step, **chosen)


def export(run_dir: Path, *, out: Path, dtype: str = "fp32", step: int | None = None) -> Path:
    """Write a run's newest weights (or those of `step`) as a Hugging Face checkpoint; the folder."""
    from megalith.checkpoint import folder, huggingface, read  # needs torch
    from megalith.parallel.data import COMPUTE_DTYPE
    from megalith.spec import families
    from megalith.train.generate import find_tokenizer

    found = folder.find(run_dir if step is None else run_dir / "checkpoints" / folder.name(step))
    spec = folder.read_manifest(found).meta["spec"]
    model = families.read(spec["model"])
    names = list(huggingface.shapes(model))
    tensors = read.read_full(found, [f"weights.{name}" for name in names], check=False)
    try:
        tokenizer = find_tokenizer(run_dir, spec.get("data", {}).get("path"))
    except FileNotFoundError:
        tokenizer = None  # weights can be of use without
    weights = {name: tensors[f"weights.{name}"] for name in names}
    huggingface.export(model, weights, out, tokenizer=tokenizer, dtype=COMPUTE_DTYPE[dtype])
    return out


def import_(source: Path, *, out: Path) -> Path:
    """Turn a Hugging Face checkpoint into one that `train.init_from` can start from; the folder."""
    from megalith.checkpoint import huggingface  # needs torch

    return huggingface.import_(source, out)


def report(run_dir: Path) -> Path:
    """Write a run's report page from the files in its folder; the page."""
    from megalith.report import page  # drawing, which only this needs

    if not (run_dir / files.FILE).is_file():
        raise FileNotFoundError(f"{run_dir} holds no {files.FILE}: it is no run folder. Give the --run-dir of a run.")
    return page.write(run_dir)


def trace(run_dir: Path) -> Path:
    """Write a run's pipeline, predicted and measured, as trace.json for Perfetto; the file."""
    from megalith.report import history, page  # drawing, which only this needs

    out = run_dir / "trace.json"
    out.write_text(json.dumps(page.trace(history.history(run_dir))), encoding="utf-8")
    return out


def summary(run_dir: Path) -> "RenderableType":
    """A run in one table."""
    from megalith.report import tables  # drawing, which only runs need

    return tables.summary(run_dir)


def plan(
    question: "Question",
    *,
    top: int = 10,
    why: bool = False,
    pareto: bool = False,
    what_ifs: Sequence[str] = (),
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> "Answer":
    """The best layouts for a model on a cluster. `tick` hears how many new parts are traced, of how many. Raises SpecErrors with all that
    is wrong with the question, or where nothing fits."""
    from megalith.planner import answer, asked  # only this predicts

    others = [(change, asked.vary(question, change)) for change in what_ifs]
    return answer.answer(asked.ask(question), top=top, why=why, pareto=pareto, what_ifs=others, tick=tick)


def atlas(question: "Question", models: Sequence[str] = (), *, tick: Callable[[str], None] = lambda name: None) -> "Atlas":
    """The best layout of several models (default: `planner.atlas.MODELS`) on numbers of nodes up to the question's cluster."""
    from megalith.planner import atlas as mapped  # see plan()

    return mapped.atlas(question, models or mapped.MODELS, tick=tick)


def draw_atlas(found: "Atlas", out: Path) -> Path:
    """Write the map as one HTML page; the file."""
    from megalith.report import atlas as pages  # drawing, which only this needs

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(pages.page(found), encoding="utf-8")
    return out


def prices(path: Path, *, overrides: Sequence[str] = ()) -> "tuple[Price, ...]":
    """What each broken rule of a run's plan costs on its cluster, predicted. Raises SpecErrors where the cluster is not one to predict."""
    from megalith.planner import asked, price  # see plan()

    question = asked.ask(asked.Question(path=path, overrides=tuple(overrides)))
    plan = question.run.plan
    counted = question.cluster.model_copy(update={"count": plan.ranks})  # a plan may leave devices of a cluster idle
    return price.prices(replace(question, cluster=counted), plan)


def prices_of(answered: "Answer") -> "tuple[Price, ...]":
    """The same for what was planned: of the run file's own plan, else of the best."""
    from megalith.planner import price  # see plan()

    return price.of_answer(answered)


def plan_as_run(answered: "Answer") -> str:
    """The best of the layouts, in a run file."""
    from megalith.planner import answer  # see plan()

    return answer.as_run(answered)


def scenario(wanted: "Wanted") -> "Prepared":
    """What is to be simulated. Raises SpecErrors with everything that is wrong with the words."""
    from megalith.rehearse import prepare

    return prepare.prepare(wanted, state_bytes=_state_bytes, step_seconds=_step_seconds)


def simulate(plan: "Scenario", *, seeds: int = 20, tick: Callable[[], None] = lambda: None) -> "Simulated":
    """Play a long run on a cluster through, with faults, once a seed; `tick` is called after each."""
    from megalith.rehearse import simulate as simulator  # see scenario()

    return simulator.simulate(plan, seeds=seeds, tick=tick)


def replay(folder: Path, *, like: Path | None = None) -> "Replayed":
    """Play a campaign's list of faults through the simulator, with the latencies of its own log. `folder`: where the campaign lies;
    `like`: the campaign whose log is taken instead.

    Raises FileNotFoundError where there is none, ValueError for one that ended before its first step.
    """
    from megalith.rehearse import replay as replayer  # see scenario()

    return replayer.replay(folder, like=like)


def try_out(
    plan: "Scenario", what: str, *, seeds: int = 20, begun: Callable[[int], None], tick: Callable[[], None]
) -> "list[Tried]":
    """The same for a range of "intervals" (seconds between checkpoints) or "spares" (nodes), the given one among them.

    `begun` is told how often `tick` will be called.
    """
    from megalith.rehearse import simulate as simulator  # see scenario()

    if what == "intervals":
        intervals = sorted({plan.store_every, *(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30, 60, 120))})
        begun(len(intervals) * seeds)
        return simulator.try_intervals(plan, intervals, seeds=seeds, tick=tick)
    powers = (2**i for i in range(20))
    counts = sorted({0, plan.fleet.spares, *(count for count in powers if count <= max(4, plan.nodes // 32))})
    begun(len(counts) * seeds)
    return simulator.try_spares(plan, counts, seeds=seeds, tick=tick)


def best_of(tried: "Sequence[Tried]", what: str) -> "Tried":
    """The interval with the best goodput, or the spares with the best of all devices that are paid for."""
    return max(tried, key=lambda one: one.goodput if what == "intervals" else one.per_device)


CHECKPOINT_BYTES = 12
"""A parameter: master weight and AdamW's two moments, each fp32."""


def _state_bytes(run: RunSpec) -> float | None:
    """Return the bytes of a checkpoint, or None if the sizes do not make a model."""
    model = Case(run, None, files=False).model
    return None if model is None else float(CHECKPOINT_BYTES * count_model(model).total)


def _step_seconds(run: Path, overrides: Sequence[str], cluster: str) -> float | None:
    """As `megalith plan` predicts it; None where the cluster is not one to predict, or the plan leaves some of it idle."""
    from megalith.planner import answer, asked  # see plan()

    try:
        found = asked.ask(asked.Question(path=run, cluster=cluster, overrides=tuple(overrides)))
    except SpecErrors:
        return None
    if found.own is None:
        return None
    return answer.scorer_of(found).estimate(answer.workload_of(found, found.own)).time.step


def draw_goodput(result: "Simulated | Sequence[Tried]", out: Path, *, what: str = "") -> Path:
    """Write what was simulated, or tried out (`what`: "intervals" or "spares"), as one SVG; the file."""
    from megalith.report import goodput, svg  # drawing, which only this needs

    if isinstance(result, Sequence):
        scale, label = (1 / 60, "minutes between checkpoints") if what == "intervals" else (1, "spare nodes")
        picture = svg.standalone(goodput.tried([replace(one, value=one.value * scale) for one in result], x_label=label))
    else:
        picture = goodput.simulated(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(picture, encoding="utf-8")
    return out


def campaign(
    path: Path,
    *,
    count: int,
    seed: int,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    supervisor_kills: int = 0,
    agent_kills: int = 0,
    aims: "Aims | None" = None,
    tick: Callable[[Path], None] = lambda folder: None,
) -> "Judgement":
    """Train what a run file describes twice, without faults and with `count` faults of Llama 3's mix, and judge the second by the first.

    Both runs lie in `out` (default: runs/NAME-campaign), which is emptied first. `supervisor_kills`: times that the supervisor itself is
    killed, besides. `agent_kills`: each node of the second run has an agent of its own, as on many machines, and so many are killed,
    besides. `aims`: speeds that are asked of it as well; None: none. `tick` is called with the folder that is trained in. Raises SpecErrors
    for a run that is not legal.
    """
    from megalith.fleet import injection
    from megalith.machine import networks
    from megalith.rehearse import campaign as runner
    from megalith.rehearse import faults, judge
    from megalith.spec.faults import tables

    checked = check(path, overrides=overrides)
    if checked.errors:
        raise SpecErrors(checked.errors)
    spec = checked.resolved.spec
    folder = (out or Path("runs") / f"{spec.name}-campaign").resolve()
    runner.clear(folder)
    own_disk = spec.checkpoint.every > 0 and runner.may_mount()
    own_data = runner.may_copy(Path(spec.data.path))
    left_out, kinds = runner.possible(
        spec.fleet, own_disk=own_disk, own_data=own_data, no_network=networks.missing(), agents=agent_kills > 0
    )
    amounts = +(
        Counter(faults.counts(count, tables()["llama3"], kinds)) + Counter(supervisor=supervisor_kills, agent=agent_kills)
    )
    injections = faults.draw(
        amounts, seed=seed, first=3, every=3, ranks=spec.plan.ranks, slots=spec.fleet.nodes,
        only_at=runner.only_at(spec.fleet, checkpoint_every=spec.checkpoint.every),
        not_before=runner.not_before(checkpoint_every=spec.checkpoint.every),
    )  # fmt: skip
    steps = max(one.step for one in injections) + faults.AFTERMATH
    listed = folder / "faults.json"
    injection.save(listed, injections)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})
    faultless, hurt = folder / runner.WHOLE, folder / runner.FAULTED
    whole = runner.run(_command(checked.resolved, spec, faultless), faultless, tick=lambda: tick(faultless))
    if "shard" in amounts:
        spec = spec.model_copy(update={"data": runner.data_of(spec.data, folder / "data")})
    faulted = _hurt(checked.resolved, spec, hurt, listed=listed, kinds=amounts, like=faultless, tick=tick)
    states = _end_state(whole.folder), _end_state(faulted.folder)
    aimed = runner.aimed(spec.fleet, checkpoint_every=spec.checkpoint.every, kinds=amounts)
    return judge.judge(
        whole, faulted, injections=listed, states=states, left_out=left_out, aimed=aimed, fleet=spec.fleet,
        timeout=spec.launch.timeout, aims=aims or judge.Aims(),
    )  # fmt: skip


def _hurt(
    resolved: Resolved, spec: RunSpec, folder: Path, *, listed: Path, kinds: Collection[str], like: Path,
    tick: Callable[[Path], None],
) -> "Ran":  # fmt: skip
    """The second run of a campaign: with the faults of a list, of these `kinds`. `like`: the first. Its nodes have agents if some are to
    be killed."""
    from megalith.fleet import local
    from megalith.fleet.seat import node_folder
    from megalith.machine import networks
    from megalith.rehearse import campaign as runner
    from megalith.rehearse.crew import Crew

    names = local.node_names(spec.fleet)
    disk = runner.disk_of(folder, like=like, small="full" in kinds)
    run = partial(runner.run, folder=folder, injections=listed, tick=lambda: tick(folder))
    if "agent" in kinds:  # on one machine: no node has processors of its own to burn in
        spec = spec.model_copy(update={"fleet": spec.fleet.model_copy(update={"burn_in": 0.0})})
        with disk:
            return run(_command(resolved, spec, folder, verb="agent"), crew=Crew(names, runner.REPAIR_SECONDS))
    memory = local.memory_root(folder, _identity(spec))
    nodes = [node_folder(memory, name) for name in names]
    with disk, networks.joined(names) if "interface" in kinds else nullcontext() as network:
        return run(_command(resolved, spec, folder), nodes=nodes, network=network)


def _command(resolved: Resolved, spec: RunSpec, run_dir: Path, verb: str = "train") -> list[str]:
    """The command that trains what is resolved, changed to `spec`; its run file lies beside the run's folder."""
    file = run_dir.with_name(f"{run_dir.name}.toml")
    file.write_text(files.dump(replace(resolved, spec=spec)), encoding="utf-8")
    return [sys.executable, "-m", "megalith.cli", verb, str(file)]


def _end_state(folder: Path) -> dict[str, Any] | None:
    """All that a run ended with, comparable: digests of the files with weights and moments, position, data, and random numbers.

    Of these there is no state that a step takes over from the one before: the order of data and the first weights are functions of the
    seed, and a step seeds torch's generator from the seed and its own number before it draws (`train.step.seed_step`). The digest in
    `rng` is that of the generator's bytes on rank 0 when the checkpoint was made: another if a step was seeded, or drew, otherwise.
    """
    from megalith.checkpoint.folder import DamagedCheckpointError, find, read_manifest  # no torch, but only this compares

    try:
        manifest = read_manifest(find(folder))
    except (FileNotFoundError, DamagedCheckpointError):
        return None
    return {"files": manifest.files, "step": manifest.step, **{key: manifest.meta[key] for key in ("position", "rng", "data")}}


def doctor(folder: Path, *, burn_in: float = 1.0, ranks: int = 0) -> "list[Finding]":
    """Check whether this machine is fit to train on; `folder` is where a run would write.

    `burn_in`: seconds of matrix products on every GPU, or the processor without one, for each data type; 0: none. `ranks`: have so many
    processes of this machine check collectives and the links between them; 0: none, and without a burn-in either no torch. A process that
    a launcher started as a rank checks them with its other ranks, and all give the findings of all machines.
    """
    from megalith.fleet import environment
    from megalith.machine import gpus, health

    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file. Give the folder that runs will write to.")
    place = environment.find()
    own = [*health.doctor(folder), *gpus.doctor()] if place is None or place.local_rank == 0 else []
    if place is None and not burn_in and not ranks:
        return own
    from megalith.prove import doctor as burner

    if place is not None:
        return burner.check_place(place, own, burn_in_seconds=burn_in)
    if ranks:
        own += burner.check_ranks(ranks)  # first: they are forked, and a process that has used a GPU cannot be
    for device in burner.devices() if burn_in else ():
        own += [replace(one, check=f"{one.check}, {device}") for one in burner.burn_in(device, seconds=burn_in)]
    return own


def launch(
    path: Path,
    *,
    engine: str,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple["Artefact", list[Problem]]:
    """What an engine needs to start a run, and advice on it. `options`: see `fleet.engines.given`.

    Raises SpecErrors with everything that is wrong with the run, or with how it is to be launched. Data that is not here may be there:
    that is advice.
    """
    from megalith.fleet import engines  # only this writes for engines

    checked = _examine(path, overrides=overrides, look=False)
    spec, errors = checked.resolved.spec, checked.errors
    here = [one for one in _examine(path, overrides=overrides, run_dir=run_dir).errors if one not in errors]
    folder = _folder(run_dir, spec)
    advice = [replace(one, severity="advice", reason=f"seen from this machine, {one.reason}") for one in here]
    try:
        chosen, more = engines.given(
            spec, engine, run_file=str(path), run_dir=str(folder), overrides=tuple(overrides), **(options or {})
        )
    except SpecErrors as found:
        raise SpecErrors([*errors, *(one for one in found.problems if one not in errors)]) from None
    if errors:
        raise SpecErrors(errors)
    return engines.emit(engine, spec, chosen), [*advice, *more]


def submit(command: str) -> int:
    """Hand a launch to its engine; the exit status of the command that takes it. Raises FileNotFoundError where there is none."""
    return subprocess.run(shlex.split(command), check=False).returncode


def prepare_data(
    sources: Sequence[str],
    *,
    tokenizer: str,
    out: Path,
    end_of_text: str | None = None,
    reading: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    progress: bool = False,
) -> "Manifest":
    """Turn text into shards of tokens with a manifest. `reading` and `options`: see `data.manifest.Reading` and `Options`."""
    from megalith.data import prepare  # numpy, tokenizers and tiktoken take half a second
    from megalith.data import tokenizer as tokenizers
    from megalith.data.manifest import Reading

    chosen = tokenizers.load(tokenizer, end_of_text=end_of_text)
    return prepare.prepare(
        sources, tokenizer=chosen, out=out, reading=Reading(**reading or {}), progress=progress, **options or {}
    )


def inspect_data(folder: Path, *, samples: int = 3) -> dict[str, Any]:
    """What a folder of prepared data holds, with counts and the beginnings of a few documents."""
    from megalith.data import inspection  # numpy and tokenizers take half a second

    return inspection.inspect(folder, samples=samples)


def verify_data(folder: Path, *, progress: bool = False) -> "Manifest":
    """Read all prepared data again and compare it with the manifest's digests."""
    from megalith.data import inspection  # numpy and tokenizers take half a second

    return inspection.verify(folder, progress=progress)


def train_tokenizer(
    sources: Sequence[str],
    *,
    vocab_size: int,
    out: Path,
    reading: dict[str, Any] | None = None,
    min_frequency: int = 2,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Learn a byte-pair vocabulary from text; what the new tokenizer is."""
    from megalith.data import tokenizer  # numpy, tokenizers and tiktoken take half a second
    from megalith.data.manifest import Reading

    learned = tokenizer.train(
        sources,
        vocab_size,
        out,
        reading=Reading(**reading or {}),
        min_frequency=min_frequency,
        overwrite=overwrite,
        progress=progress,
    )
    return {"folder": str(out), **learned.record.model_dump()}


def _folder(run_dir: Path | None, spec: RunSpec) -> Path:
    """Where a run is kept."""
    return run_dir or Path("runs") / spec.name


def _examine(
    path: Path, *, overrides: Sequence[str], world: int | None = None, look: bool = True, run_dir: Path | None = None
) -> Checked:
    """A run file and what is wrong with it, on disk too if `look`. Raises SpecErrors as `check` does."""
    reading = files.read(path, overrides=overrides)
    resolved = reading.resolved
    named = run_dir is not None or hasattr(resolved.spec, "name")
    begun = look and named and bool(committed(_folder(run_dir, resolved.spec) / "checkpoints"))
    found = find_problems(resolved.spec, world=world, files=look, begun=begun, provenance=resolved.provenance)
    if reading.problems:
        known = {problem.key for problem in reading.problems}
        faulty = {_table(key) for key in known}  # a default in one may stand for what a faulty key meant
        others = (p for p in found if p.key not in known and (p.source != "default" or _table(p.key) not in faulty))
        raise SpecErrors([*reading.problems, *others])
    return Checked(resolved, found)


def _table(name: str) -> str:
    return name.rpartition(".")[0]


def _other_run(resolved: Resolved, folder: Path) -> list[Problem]:
    """Why the run in a folder is another one; empty where there is none, or none that got far enough to be gone on with."""
    if not (folder / files.FILE).is_file() or not committed(folder / "checkpoints"):
        return []
    saved = files.read(folder / files.FILE).resolved.spec  # its cluster's file need not be there any more
    return check_resume(saved, resolved.spec, provenance=resolved.provenance)


def _too_many(spec: RunSpec) -> list[Problem]:
    """More ranks than one machine should start by itself."""
    cores = os.cpu_count() or 1
    if spec.plan.ranks <= max(16, 2 * cores):
        return []
    reason = f"data x tensor x pipeline = {spec.plan.ranks} ranks are too many for this machine of {cores} cores"
    way_out = "Start one `megalith train` a rank with torchrun or srun on more machines, or use a smaller plan."
    return [Problem("error", "plan.data", spec.plan.data, reason, way_out)]


def _admit(spec: RunSpec, folder: Path) -> None:
    """Have a quick look at this machine before ranks are first started on it: say what is short. Raises UnfitError if it cannot do."""
    if spec.fleet.looks_before_start:
        from megalith.machine import admission

        admission.admit(folder)


def _start(
    resolved: Resolved,
    folder: Path,
    entry: str,
    arguments: dict[str, Any],
    *,
    tick: Callable[[], None] | None,
    recover: bool = False,
) -> "Outcome":
    """Start the plan's ranks on this machine and stay with them; `recover`: through faults, as the run's fleet says."""
    from megalith.control import controller, supervisor

    spec = resolved.spec
    files.save(resolved, folder)
    job = _job(spec, folder, entry, arguments)
    if not (recover and spec.fleet.recover):
        return supervisor.run(job, tick=tick)
    return controller.run_here(job, fleet=spec.fleet, identity=_identity(spec), store=lambda: _checkpoints(folder), tick=tick)


def _job(spec: RunSpec, folder: Path, entry: str, arguments: dict[str, Any]) -> "Job":
    """What all ranks of a run are started for."""
    from megalith.fleet.job import Job
    from megalith.machine.admission import burn_in  # only commands with ranks start some

    fallback = None
    if spec.fleet.fallback is not None and entry == TRAIN:
        smaller = spec.model_copy(update={"plan": spec.fleet.fallback, "fleet": spec.fleet.model_copy(update={"fallback": None})})
        fallback = _job(smaller, folder, entry, arguments | {"shrunk": True})
    return Job(
        entry=entry,
        arguments=arguments,
        ranks=spec.plan.ranks,
        fallback=fallback,
        run_dir=folder,
        preload=(*PRELOAD, entry.partition(":")[0]),
        start_timeout=spec.launch.start_timeout,
        silence_timeout=spec.launch.timeout,
        threads=spec.launch.threads,
        burn_in=burn_in(spec.fleet.burn_in, spec.train.device),
        burn_in_timeout=spec.launch.start_timeout + spec.fleet.burn_in,
    )


def _identity(spec: RunSpec) -> str:
    """What a run computes: copies in memory of a run that computes something else are not this run's."""
    return spec.model_dump_json(exclude={"fleet", "launch", "log", "validation", "checkpoint", "name"})


def _checkpoints(folder: Path) -> "tuple[Copy, ...]":
    """A run's checkpoints as copies of its state. One that was committed before the run was sent back to an earlier step is none."""
    from megalith.checkpoint.folder import latest, read_manifest
    from megalith.fleet.tiers import Copy, Tier

    newest = latest(folder / "checkpoints")
    if newest is None:
        return ()
    last = read_manifest(newest).step
    steps = (int(path.name.removeprefix("step-")) for path in committed(folder / "checkpoints"))
    return tuple(Copy(Tier.STORE, step) for step in steps if step <= last)


def _end_with_torchrun(place: "Place | None") -> None:
    """Have this process end with the torchrun that started it. torchrun only sees to that when it ends in order: killed, it leaves ranks
    that go on and write to the run folder, beside those of the next start."""
    from megalith.machine import lifeline  # only commands with ranks have something to outlive

    if place is not None and place.kind == "torchrun":
        lifeline.die_with_parent(os.getppid())


def _join(resolved: Resolved, folder: Path, place: "Place", entry: str, arguments: dict[str, Any]) -> int:
    """Be the rank that torchrun or Slurm started; its exit status. Raises what says that the same command fails again."""
    from megalith.fleet import causes  # only commands with ranks end as ranks do
    from megalith.fleet.exit_codes import ExitCode

    if place.rank == 0:
        files.save(resolved, folder)
    else:
        _await(resolved, folder, timeout=resolved.spec.launch.start_timeout)
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(**arguments)
    except SystemExit as end:  # a rank that was asked to stop ends so, once the state is saved
        return int(end.code or 0)
    except Exception as error:
        if (status := causes.status(error)) == ExitCode.FAILED:
            raise
        traceback.print_exc()
        return status
    return 0


@contextmanager
def _called_often(function: Callable[[], None]) -> Iterator[None]:
    """Call `function` twice a second while the block runs."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(0.5):
            function()

    thread = threading.Thread(target=loop, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _await(resolved: Resolved, folder: Path, *, timeout: float) -> None:
    """Wait until rank 0 has written this very run: an older one may lie in the folder. Raises TimeoutError."""
    text, path, end = files.dump(resolved), folder / files.FILE, time.monotonic() + timeout
    while not (path.is_file() and path.read_text(encoding="utf-8") == text):
        if time.monotonic() > end:
            raise TimeoutError(
                f"rank 0 has not written this run to {path} within launch.start_timeout = {timeout:g} s. "
                "All ranks need the same run folder on a shared file system, and the same command."
            )
        time.sleep(0.05)


def _report(folder: Path) -> Path | None:
    """The report page; None if the run wrote nothing to report. A run that trained well does not fail over its report."""
    try:
        return report(folder)
    except (OSError, ValueError):
        return None


def described(resolved: Resolved) -> dict[str, Any]:
    """A resolved run for programs."""
    return {"spec": resolved.spec.model_dump(mode="json"), "provenance": resolved.provenance}


def problem_rows(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Problems for programs."""
    return [asdict(problem) for problem in problems]
