"""`megalith import`: a checkpoint made of other programs' weights."""

from pathlib import Path
from typing import Annotated

import typer

from megalith.commands.shared.arguments import Json, one_of
from megalith.commands.shared.output import print_json


def command(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The checkpoint to write.", show_default=False)],
    from_: Annotated[str, typer.Option("--from", help="Format: hf (Hugging Face transformers).")] = "hf",
    as_json: Json = False,
) -> None:
    """Convert another program's weights into a checkpoint; a run starts from it with train.init_from.

    Example:  megalith import Llama-3.2-1B --from hf --out checkpoints/llama
    """
    one_of("--from", from_, "hf")
    if not source.is_dir():
        hub = f" A model of a hub is downloaded first: hf download {source} --local-dir FOLDER." if len(source.parts) == 2 else ""
        raise FileNotFoundError(f"{source} does not exist here. Give a folder with config.json and safetensors.{hub}")
    from megalith.checkpoint import huggingface  # needs torch

    folder = huggingface.import_(source, out)
    said = f"imported: {folder}\nA run starts from it with --set train.init_from={folder}"
    print_json({"ok": True, "folder": str(folder)}) if as_json else print(said)
