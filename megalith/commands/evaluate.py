"""`megalith eval`: the loss of a trained model on the user's own text."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.commands.data import Extensions, Field, Sources, Split, reading
from megalith.commands.shared.arguments import AtStep, Json, OwnParts, RunFolder, admit_parts
from megalith.commands.shared.output import print_json

if TYPE_CHECKING:
    from megalith.data.manifest import Reading
    from megalith.train.evaluate import Score


def command(
    run_dir: RunFolder,
    sources: Sources,
    split: Split = None,
    field: Field = "text",
    extensions: Extensions = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens in a window. Default: the run's train.seq_len.")] = None,
    step: AtStep = None,
    own: OwnParts = None,
    as_json: Json = False,
) -> None:
    """Measure the loss of a trained model on text: nats a token, perplexity, bits a byte. `megalith report` shows the held-out loss.

    Example:  megalith eval runs/first texts/new.txt
    """
    admit_parts(own)
    score = evaluate(run_dir, sources, reading=reading(split, field, extensions), step=step, seq_len=seq_len)
    if as_json:
        print_json({"ok": True, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte} | asdict(score))
        return
    print(
        f"loss {score.loss:.4f} nats a token, perplexity {score.perplexity:.4g}, {score.bits_per_byte:.4f} bits a byte "
        f"({score.tokens:,} tokens, step {score.step:,})"
    )


def evaluate(
    run_dir: Path, sources: list[str], *, reading: "Reading | None" = None, step: int | None = None, seq_len: int | None = None
) -> "Score":
    """Return the loss of a run's newest weights (or the weights of `step`) on the documents of `sources`, which have the form that `data
    prepare` accepts."""
    from megalith.data.manifest import DEFAULT_READING
    from megalith.data.sources import documents, parse_sources
    from megalith.train import evaluate as scoring  # needs torch

    texts = (text for source in parse_sources(sources) for text in documents(source, reading or DEFAULT_READING))
    return scoring.evaluate(run_dir, texts, step=step, seq_len=seq_len)
