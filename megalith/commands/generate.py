"""`megalith generate`: text from a trained model."""

from typing import Annotated

import typer

from megalith.commands.shared.arguments import AtStep, Json, OwnParts, RunFolder, admit_parts
from megalith.commands.shared.output import print_json


def command(
    run_dir: RunFolder,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature: below 1 safer, above 1 wilder; 0: greedy.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling: the same seed gives the same text.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    step: AtStep = None,
    own: OwnParts = None,
    as_json: Json = False,
) -> None:
    """Generate text with a trained model.

    Example:  megalith generate runs/first --prompt "It is a truth" --tokens 80 --top-k 40
    """
    from megalith.train.generate import generate  # needs torch

    admit_parts(own)
    heat = 0.0 if greedy else temperature
    text = generate(run_dir, prompt, tokens=tokens, step=step, temperature=heat, top_k=top_k, top_p=top_p, seed=seed)
    print_json({"ok": True, "prompt": prompt, "text": text}) if as_json else print(text)
