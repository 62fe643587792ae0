"""`megalith tokenizer`: make tokenizers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from megalith.commands.data import Extensions, Field, Sources, Split, reading
from megalith.commands.shared.arguments import Json, Overwrite
from megalith.commands.shared.output import print_json


def train(
    sources: Sources,
    vocab: Annotated[int, typer.Option(help="Vocabulary size, such as 4096 for a few megabytes of text.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write tokenizer.json to.", show_default=False)],
    split: Split = None,
    field: Field = "text",
    extensions: Extensions = None,
    min_frequency: Annotated[int, typer.Option(min=1, help="Pairs that occur less often than this are not merged.")] = 2,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer.

    Example:  megalith tokenizer train bundled:austen --vocab 4096 --out data/tokenizer
    """
    from megalith.data import tokenizer  # numpy, tokenizers and tiktoken take half a second to import

    learned = tokenizer.train(
        sources, vocab, out, reading=reading(split, field, extensions), min_frequency=min_frequency, overwrite=overwrite,
        progress=not as_json,
    ).record  # fmt: skip
    short = vocab - learned.vocab_size
    if as_json:
        print_json({"ok": True, "folder": str(out), "asked": vocab, **learned.model_dump()})
        return
    print(f"trained: {out}, {learned.vocab_size:,} tokens")
    if short > 0:
        print(
            f"advice: {vocab:,} tokens were requested, but no further pair in the text occurs {min_frequency} times. Give "
            f"more text, or set model.vocab to {learned.vocab_size} or more.",
            file=sys.stderr,
        )
