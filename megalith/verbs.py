"""What the program can do, one function each: the table of contents. `cli` parses arguments for these and prints what they give.

Parts that need torch, or take long to import, are imported by the verb that uses them, so that each command starts fast.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megalith.check import check as find_problems
from megalith.check import check_resume
from megalith.spec import files
from megalith.spec.files import Resolved
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megalith.data.manifest import Manifest
    from megalith.fleet.environment import Place
    from megalith.fleet.outcome import Outcome

PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")
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
class Trained:
    """How a training run ended. `code` is the exit status (`fleet.exit_codes`), `message` what a person should read.

    `report` is None where none could be written, and on all ranks but the first, which also have nothing to say.
    """

    run_dir: Path
    code: int
    message: str
    report: Path | None


def check(path: Path, *, overrides: Sequence[str] = (), world: int | None = None) -> Checked:
    """Read a run file and find everything that is wrong with it, or unwise. Raises SpecErrors when it cannot be read as a run."""
    resolved = files.load(path, overrides=overrides)
    return Checked(resolved, find_problems(resolved.spec, world=world, provenance=resolved.provenance))


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
    checked = check(path, overrides=overrides, world=place.world if place else None)
    folder = run_dir or Path("runs") / checked.resolved.spec.name
    problems = [*checked.errors, *_other_run(checked.resolved, folder), *([] if place else _too_many(checked.resolved.spec))]
    if problems:
        raise SpecErrors(problems)
    arguments = {"run_dir": str(folder.resolve())} | ({"profile": profile} if profile else {})
    entry = "megalith.train.run:main"
    if place is not None and place.rank > 0:
        return Trained(folder, _join(checked.resolved, folder, place, entry, arguments), "", None)
    from megalith.report.live import Follow  # drawing, for the one process that people watch

    with Follow(folder, checked.resolved.spec.train.steps, console) as follow:
        if place is None:
            outcome = _start(checked.resolved, folder, entry, arguments, tick=follow.poll)
            code, message = outcome.code, outcome.message()
        else:
            with _called_often(follow.poll):
                code = _join(checked.resolved, folder, place, entry, arguments)
            message = f"ended with status {code}" if code else "finished"
    return Trained(folder, code, message, _report(folder))


def parity(path: Path, *, overrides: Sequence[str] = (), steps: int = 3, run_dir: Path | None = None) -> dict[str, Any]:
    """Train a small model under the run's plan and in one process, and compare: `{"equal", "rows": [...], "model", "steps"}`.

    Ranks are started as by `train`; their folder is `run_dir` (default: runs/NAME-parity). The run's data is not needed.
    Raises SpecErrors for a plan that is not legal, RuntimeError with the first cause when a rank fails.
    """
    from megalith.fleet import environment  # only commands with ranks ask who started them

    place = environment.find()
    resolved = files.load(path, overrides=overrides)
    found = find_problems(resolved.spec, world=place.world if place else None, files=False, provenance=resolved.provenance)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise SpecErrors(errors)
    folder = run_dir or Path("runs") / f"{resolved.spec.name}-parity"
    arguments = {"run_dir": str(folder.resolve()), "steps": steps}
    result, entry = folder / "parity.json", "megalith.train.parity:main"
    if place is not None:
        _join(resolved, folder, place, entry, arguments)
    else:
        result.unlink(missing_ok=True)
        outcome = _start(resolved, folder, entry, arguments, tick=None)
        if outcome.code:
            raise RuntimeError(outcome.message())
    return json.loads(result.read_text(encoding="utf-8"))


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
    from megalith.spec.llama import Llama

    found = folder.find(run_dir if step is None else run_dir / "checkpoints" / folder.name(step))
    spec = folder.read_manifest(found).meta["spec"]
    model = Llama.model_validate(spec["model"])
    names = list(huggingface.shapes(model))
    tensors = read.read_full(found, [f"weights.{name}" for name in names], check=False)
    data = spec.get("data", {}).get("path")
    tokenizers = (place / "tokenizer.json" for place in (run_dir, *([Path(data)] if data else [])))
    huggingface.export(
        model,
        {name: tensors[f"weights.{name}"] for name in names},
        out,
        tokenizer=next((path for path in tokenizers if path.is_file()), None),
        dtype=COMPUTE_DTYPE[dtype],
    )
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


def summary(run_dir: Path) -> "RenderableType":
    """A run in one table."""
    from megalith.report import tables  # drawing, which only runs need

    return tables.summary(run_dir)


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


def _other_run(resolved: Resolved, folder: Path) -> list[Problem]:
    """Why the run in a folder is another one; empty where there is none, or none that got far enough to be gone on with."""
    from megalith.checkpoint.folder import committed  # no torch, but only training looks for checkpoints

    if not (folder / files.FILE).is_file() or not committed(folder / "checkpoints"):
        return []
    return check_resume(files.load(folder / files.FILE).spec, resolved.spec, provenance=resolved.provenance)


def _too_many(spec: RunSpec) -> list[Problem]:
    """More ranks than one machine should start by itself."""
    cores = os.cpu_count() or 1
    if spec.plan.ranks <= max(16, 2 * cores):
        return []
    reason = f"data x tensor x pipeline = {spec.plan.ranks} ranks are too many for this machine of {cores} cores"
    way_out = "Start one `megalith train` a rank with torchrun or srun on more machines, or use a smaller plan."
    return [Problem("error", "plan.data", spec.plan.data, reason, way_out)]


def _start(
    resolved: Resolved, folder: Path, entry: str, arguments: dict[str, Any], *, tick: Callable[[], None] | None
) -> "Outcome":
    """Start the plan's ranks on this machine and stay with them."""
    from megalith.fleet import supervisor  # only commands with ranks start some

    launch = resolved.spec.launch
    files.save(resolved, folder)
    job = supervisor.Job(
        entry=entry,
        arguments=arguments,
        ranks=resolved.spec.plan.ranks,
        run_dir=folder,
        preload=(*PRELOAD, entry.partition(":")[0]),
        start_timeout=launch.start_timeout,
        silence_timeout=launch.timeout,
        threads=launch.threads,
    )
    return supervisor.run(job, tick=tick)


def _join(resolved: Resolved, folder: Path, place: "Place", entry: str, arguments: dict[str, Any]) -> int:
    """Be the rank that torchrun or Slurm started; its exit status."""
    if place.rank == 0:
        files.save(resolved, folder)
    else:
        _await(resolved, folder, timeout=resolved.spec.launch.start_timeout)
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(**arguments)
    except SystemExit as end:  # a rank that was asked to stop ends so, once the state is saved
        return int(end.code or 0)
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
