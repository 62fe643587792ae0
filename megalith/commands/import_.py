"""`megalith import`: a checkpoint made of other programs' weights."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from megalith.commands.init import starting_from, text
from megalith.commands.shared.arguments import Json, one_of
from megalith.commands.shared.output import print_json, write

RUN_FILE = "start.toml"


def command(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The checkpoint to write.", show_default=False)],
    from_: Annotated[str, typer.Option("--from", help="Format: hf (Hugging Face transformers).")] = "hf",
    as_json: Json = False,
) -> None:
    """Convert another program's weights into a checkpoint, and write a run file that starts from this checkpoint.

    Example:  megalith import downloads/Llama-3.2-1B --out checkpoints/llama
    """
    one_of("--from", from_, "hf")
    if not source.is_dir():
        hub = f" Download a model of a hub first: hf download {source} --local-dir FOLDER." if len(source.parts) == 2 else ""
        raise FileNotFoundError(f"{source} is not a folder here. Give a folder with config.json and safetensors.{hub}")
    from megalith.checkpoint import huggingface  # needs torch
    from megalith.data.manifest import TOKENIZER_FILE

    made = huggingface.import_(source, out)
    run_file = out / RUN_FILE
    write(text(starting_from(out, made.spec), by="megalith import"), run_file, overwrite=True)
    if as_json:
        print_json({"ok": True, "folder": str(made.path), "run_file": str(run_file), "left_out": made.left_out})
        return
    if made.left_out:
        print(f"left out: {made.left_out}")
    print(f"imported: {made.path}\nrun file: {run_file}")
    has_one = (out / TOKENIZER_FILE).is_file()
    tokenizer, checked = shlex.quote(str(out)) if has_one else "TOKENIZER", shlex.quote(str(run_file))
    print(f"next: megalith data prepare TEXT --tokenizer {tokenizer} --out data/tokens, then megalith check {checked}")
    if not has_one:
        print(f"{source} has no {TOKENIZER_FILE}: replace TOKENIZER by the tokenizer with which the model was trained")
