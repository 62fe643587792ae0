"""`megalith export`: a run's weights for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from megalith.commands.shared.arguments import AtStep, Json, RunFolder, one_of
from megalith.commands.shared.output import print_json


def command(
    run_dir: RunFolder,
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="Format: hf (Hugging Face transformers).")] = "hf",
    dtype: Annotated[str, typer.Option(help="Number format: fp32 (lossless), bf16 or fp16 (half the size).")] = "fp32",
    step: AtStep = None,
    as_json: Json = False,
) -> None:
    """Write a run's weights in a format of other programs.

    Example:  megalith export runs/first --to hf --out exported
    """
    from megalith.spec.numbers import FAST  # specifications take 0.2 s to import

    one_of("--to", to, "hf")
    one_of("--dtype", dtype, *FAST)
    folder = export(run_dir, out=out, dtype=dtype, step=step)
    print_json({"ok": True, "folder": str(folder)}) if as_json else print(f"exported: {folder}")


def export(run_dir: Path, *, out: Path, dtype: str = "fp32", step: int | None = None) -> Path:
    """Write a run's newest weights (or the weights of `step`) as a Hugging Face checkpoint, and return its folder."""
    from megalith.checkpoint import folder, huggingface, read  # needs torch
    from megalith.kernels.numbers import DTYPE
    from megalith.spec import families
    from megalith.train.generate import find_tokenizer

    found = folder.find(run_dir if step is None else folder.of_run(run_dir) / folder.name(step))
    spec = folder.read_manifest(found).meta["spec"]
    model = families.read(spec["model"])
    names = list(huggingface.shapes(model))
    tensors = read.read_full(found, [f"weights.{name}" for name in names], check=False)
    try:
        tokenizer = find_tokenizer(run_dir, spec.get("data", {}).get("path"))
    except FileNotFoundError:
        tokenizer = None  # weights can be of use without
    weights = {name: tensors[f"weights.{name}"] for name in names}
    huggingface.export(model, weights, out, tokenizer=tokenizer, dtype=DTYPE[dtype])
    return out
