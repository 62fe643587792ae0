"""Prepared data without text: manifest, tokenizer, and sparse shards."""

from pathlib import Path

from megalith.data.manifest import Domain, Manifest, Options, Shard, Split, TokenizerRecord, tokenizer_fingerprint


def hollow_data(folder: Path, *domains: str, train: int = 2_000_000, validation: int = 1000, vocab: int = 1000) -> Manifest:
    """Write a prepared folder with these domains, each with this number of tokens."""
    folder.mkdir(parents=True)

    def split(name: str, tokens: int) -> Split:
        digests = {"sha256": "0" * 64, "index_sha256": "0" * 64}
        shard = Shard(file=f"{name}.bin", index=f"{name}.idx", dtype="uint16", tokens=tokens, documents=1, **digests)
        for file, size in ((shard.file, 2 * tokens), (shard.index, 16)):
            with (folder / file).open("wb") as hollow:
                hollow.truncate(size)
        return Split(tokens=tokens, documents=1, shards=(shard,))

    tokenizer = TokenizerRecord(
        fingerprint=tokenizer_fingerprint({}, 0), vocab_size=vocab, end_of_text=0, end_of_text_token="<|endoftext|>"
    )
    manifest = Manifest(
        tokenizer=tokenizer,
        options=Options(),
        sources=(),
        domains={
            name: Domain(train=split(f"{name}-train", train), validation=split(f"{name}-validation", validation))
            for name in domains
        },
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "manifest.json").write_text(manifest.text())
    return manifest
