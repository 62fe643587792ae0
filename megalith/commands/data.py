"""`megalith data`: prepare text for training, and inspect prepared data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith.commands.shared.arguments import Json, Overwrite
from megalith.commands.shared.output import print_json

if TYPE_CHECKING:
    from megalith.data.manifest import Reading

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Prepared data.", show_default=False)]
Sources = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help="Files or folders of text, as PATH or DOMAIN=PATH, or bundled:austen.")
]
Split = Annotated[
    str | None,
    typer.Option(
        help="How plain text is split into documents: blank, line, file, heading:REGEX or delimiter:REGEX. In a folder, each file of "
        "plain text is one document."
    ),
]
Field = Annotated[str, typer.Option(help="JSON lines: the field that holds the text.")]
Extensions = Annotated[
    list[str] | None, typer.Option("--extension", help="In folders, read only files with this extension. May be repeated.")
]


def prepare(
    sources: Sources,
    tokenizer: Annotated[
        str, typer.Option(help="A tokenizer.json, a folder that holds a tokenizer.json, or bytes.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    split: Split = None,
    field: Field = "text",
    extensions: Extensions = None,
    validation: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of each domain's documents to hold out.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens per shard.")] = 100_000_000,
    seed: Annotated[int, typer.Option(help="Seed that chooses the held-out documents.")] = 0,
    end_of_text: Annotated[str | None, typer.Option(help="The token that ends a document.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into shards. Each source is a domain, to which a run can give a weight in the mixture; DOMAIN=PATH names the domain.

    Example:  megalith data prepare novels=texts/ code=src/ --tokenizer data/tokenizer --out data/mixed
    """
    from megalith.data import prepare as preparing  # numpy, tokenizers and tiktoken take half a second to import
    from megalith.data import tokenizer as tokenizers

    manifest = preparing.prepare(
        sources, tokenizer=tokenizers.load(tokenizer, end_of_text=end_of_text), out=out, reading=reading(split, field, extensions),
        validation=validation, shard_tokens=shard_tokens, seed=seed, overwrite=overwrite, progress=not as_json,
    )  # fmt: skip
    if as_json:
        print_json({"ok": True, "folder": str(out), "sha256": manifest.sha256, "manifest": manifest.model_dump(mode="json")})
        return
    for name, domain in manifest.domains.items():
        print(f"{name}: {domain.train.tokens:,} training tokens, {domain.validation.tokens:,} held out")
    print(f"prepared: {out}")


def inspect(
    folder: Folder,
    samples: Annotated[int, typer.Option(min=0, help="Number of documents of each domain to preview.")] = 3,
    as_json: Json = False,
) -> None:
    """Show the contents of prepared data: tokens, documents and their lengths, by domain.

    Example:  megalith data inspect data/austen
    """
    from megalith.data import inspection  # numpy and tokenizers take half a second to import

    found = inspection.inspect(folder, samples=samples)
    print_json({"ok": True} | found) if as_json else _show(found)


def verify(folder: Folder, as_json: Json = False) -> None:
    """Read prepared data, compare it with its digests, and list damaged files.

    Example:  megalith data verify data/austen
    """
    from megalith.data import inspection  # numpy and tokenizers take half a second to import

    manifest = inspection.verify(folder, progress=not as_json)
    print_json({"ok": True, "sha256": manifest.sha256}) if as_json else print(f"intact: {folder}, manifest {manifest.sha256}")


def reading(split: str | None, field: str, extensions: list[str] | None) -> "Reading":
    """Return the options for splitting files into documents."""
    from megalith.data.manifest import Reading

    return Reading(split=split, field=field, extensions=tuple(extensions) if extensions else None)


def _show(found: dict[str, Any]) -> None:
    table = Table("domain", "split", "tokens", "documents", "bytes a token", "median document")
    for name, domain in found["domains"].items():
        for part in ("train", "validation"):
            row = domain[part]
            density, median = row["bytes_per_token"], row["document_tokens"].get("median")
            counts = (f"{row['tokens']:,}", f"{row['documents']:,}")
            table.add_row(name, part, *counts, f"{density:.2f}" if density else "-", f"{median:,.0f} tokens" if median else "-")
    console = Console(highlight=False)
    vocab, digest = found["tokenizer"]["vocab_size"], found["manifest_sha256"]
    console.print(f"{found['folder']}: a vocabulary of {vocab:,} tokens, manifest {digest}", soft_wrap=True, markup=False)
    console.print(table)
    for name, domain in found["domains"].items():
        for text in domain["train"]["samples"]:
            console.print(f"[bold]{escape(name)}[/]  {escape(' '.join(text.split()))[:200]}")
