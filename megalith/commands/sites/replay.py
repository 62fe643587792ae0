"""`megalith replay`: repeat the recorded merges of a run across sites, and compare the bits."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megalith.commands.shared.arguments import Json, RunFolder, RunRequest
from megalith.commands.shared.output import print_json


@dataclass(frozen=True)
class ReplayResult:
    """The outcome of a replay. `tensors`: number of tensors of the merged weights; `different`: names of tensors with different bits."""

    run_dir: Path
    code: int
    tensors: int
    different: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if all bits are the same."""
        return self.tensors > 0 and not self.different


def command(
    run_dir: RunFolder,
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR ...]",
            help="Run folders of other sites, if the log in RUN_DIR lacks merges.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder of the replay. Default: RUN_DIR-replay.")] = None,
    as_json: Json = False,
) -> int:
    """Train a run across sites again on this machine, repeating the merges that its log has recorded, and compare the merged weights.

    Sites may have left and joined during the run. The replay goes up to the run's newest checkpoint. Exit status 1 if any bit
    differs.

    Example:  megalith replay runs/two --out runs/two-again
    """
    named = run_dir.resolve() if run_dir.name in ("", "..") else run_dir  # `.` has no name
    found = replay(run_dir, others or (), out or named.with_name(f"{named.name}-replay"), console=Console(stderr=as_json))
    if as_json:
        print_json({"ok": found.ok} | asdict(found))
    elif found.ok:
        print(
            f"all {found.tensors} tensors of the merged weights have the same bits in the run and in its replay: {found.run_dir}"
        )
    elif found.different:
        print(f"{len(found.different)} of {found.tensors} tensors differ; the first is {found.different[0]}", file=sys.stderr)
    return 0 if found.ok else found.code or 1


def replay(run_dir: Path, others: list[Path] | tuple[Path, ...], out: Path, *, console: Console) -> ReplayResult:
    """Train again, into a new run folder `out`, with the merges that the folders `run_dir` and `others` have recorded. Raises SpecErrors
    before anything starts, RecordError if `out` exists, if merges are missing or if the run file changed during the run, and
    FileNotFoundError for a folder without a run."""
    from megalith.checkpoint.read import read_full  # torch takes seconds to import
    from megalith.commands.train import train
    from megalith.fleet.exit_codes import ORDERLY
    from megalith.spec.toml import literal
    from megalith.train.sites.record import RecordError, recorded

    if out.exists():
        raise RecordError(f"{out} exists, but a replay needs a new folder. Name another folder with --out, or remove this folder")
    folders = [str(folder.resolve()) for folder in (run_dir, *others)]
    recorded([Path(folder) for folder in folders])  # now, and not from the log of a rank
    request = RunRequest.in_folder(run_dir)
    settings = {"replay": folders, "site": None, "addresses": [], "tls": None}
    overrides = [f"sites.{key}={literal(value)}" for key, value in settings.items()]
    overrides.append("fleet.recover=false")  # a site that started again would wait for differences that the others no longer send
    trained = train(RunRequest(request.file, overrides, out, saved=True), console=console)
    if trained.code not in ORDERLY:
        print(trained.message, file=sys.stderr)
        return ReplayResult(out, trained.code, 0, ())
    weights = [
        {name: tensor for name, tensor in read_full(folder).items() if name.startswith("weights.")} for folder in (run_dir, out)
    ]
    names = sorted(weights[0].keys() | weights[1].keys())
    different = [name for name in names if not _same(weights[0].get(name), weights[1].get(name))]
    return ReplayResult(out, trained.code, len(names), tuple(different))


def _same(one: object, other: object) -> bool:
    import torch

    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
