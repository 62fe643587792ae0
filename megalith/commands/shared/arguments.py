"""Arguments that several commands take. Quick to import."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith import disk, epochs

if TYPE_CHECKING:
    from megalith.spec.run import RunSpec

RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run file (TOML): model, plan, data, training.", show_default=False)
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a value of the run file, such as train.steps=100. May be repeated."),
]
AtStep = Annotated[int | None, typer.Option("--step", help="Use the checkpoint of this step. Default: the newest.")]
OwnParts = Annotated[
    list[str] | None,
    typer.Option(
        "--own", metavar="MODULE:OBJECT", help="Import your own part of the model. May be repeated.", show_default=False
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite output that was made with other settings.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


@dataclass(frozen=True)
class RunRequest:
    """A run as given on the command line: its file, `KEY=VALUE` settings that override the file, and its folder (None: runs/NAME). `saved`:
    the file is the copy in the run folder, which an earlier version of Megalith may have written."""

    file: Path
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    saved: bool = False

    @classmethod
    def in_folder(cls, run_dir: Path, overrides: Sequence[str] = ()) -> "RunRequest":
        """Return the request for the run in a run folder. Raises FileNotFoundError if the folder does not exist or is no run folder."""
        from megalith.spec.files import FILE  # specifications take 0.2 s to import

        if not disk.is_folder(run_dir):
            raise FileNotFoundError(f"{run_dir} is not a folder. Give the folder of a run: the --run-dir of `megalith train`.")
        file, plain = epochs.newest(run_dir, FILE), run_dir / FILE
        if not disk.is_file(file):
            raise FileNotFoundError(f"{run_dir} holds no {FILE}: it is not a run folder. Give the --run-dir of a run.")
        if file != plain and disk.is_file(plain) and plain.read_bytes() != file.read_bytes():
            print(
                f"advice: {plain} is only a copy, and differs from {file}, which is used. Change {file} instead", file=sys.stderr
            )
        return cls(file, overrides, run_dir, saved=True)

    def folder(self, spec: "RunSpec") -> Path:
        """Return the folder of the run; `spec` is the content of its file."""
        return self.run_dir or Path("runs") / spec.name


def admit_parts(names: Sequence[str] | None) -> None:
    """Import the user's own model parts that a command line names. Raises own.OwnPartError for a name that does not refer to a model
    part."""
    for name in names or ():
        from megalith import own
        from megalith.spec import parts  # specifications take 0.2 s to import

        try:
            parts.admit(name)
        except own.OwnPartError as error:
            raise own.OwnPartError(f"--own {name}: {error}") from error


def one_of(option: str, value: str, *known: str) -> None:
    """Raise a usage error unless `value` is one of the `known` values."""
    if value not in known:
        raise typer.BadParameter(f"{option} {value!r} is not known. Use {option} {' or '.join(known)}.")
