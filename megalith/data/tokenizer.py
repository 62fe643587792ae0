"""Tokenizers: bytes, or any `tokenizer.json`; and training of a byte-level BPE on the user's text.

Text never becomes a special token: the text `<|endoftext|>` in a document never gets the id that ends documents.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from rich.progress import TaskID
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalith import disk, epochs
from megalith.data.errors import DataError
from megalith.data.manifest import DEFAULT_READING, TOKENIZER_FILE, Reading, TokenizerRecord, tokenizer_fingerprint
from megalith.data.progress import bars
from megalith.data.sources import Source, documents, find, parse_sources, size
from megalith.data.tiktoken_encoder import byte_characters, reproduce

END_OF_TEXT = "<|endoftext|>"
BYTES = "bytes"
SMALLEST_VOCABULARY = 257  # every byte, and the end of text

_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_BATCH_CHARACTERS = 1 << 22
_BATCH_DOCUMENTS = 4096
_COMPARED_CHARACTERS = 1 << 18

Ids = npt.NDArray[np.int64]
Engine = Literal["auto", "tiktoken", "tokenizers"]


class Tokenizer:
    """One tokenizer. `vocab_size` is one more than the largest id; `end_of_text` is the id that ends every document."""

    def __init__(self, text: str, *, end_of_text: str | None = None, origin: str = TOKENIZER_FILE) -> None:
        """`text`: content of a tokenizer.json. `end_of_text` names the token that ends documents; None: one of the usual names.

        Raises DataError if `text` is no tokenizer.json, or has no such token.
        """
        self._text = text
        self._definition = _definition(text, origin)
        try:
            self._engine = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"{origin} is not a tokenizer.json that version {tokenizers.__version__} of tokenizers reads: {error}"
            ) from error
        self._engine.encode_special_tokens = True  # as text: what a document spells out is not a command
        self._engine.no_padding()
        self._engine.no_truncation()
        ids = self._engine.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=-1) + 1
        self.end_of_text_token: str = _end(ids, end_of_text, origin)
        self.end_of_text: int = ids[self.end_of_text_token]
        self.fingerprint: str = tokenizer_fingerprint(self._definition, self.end_of_text)

    @cached_property
    def kind(self) -> str:
        """`bytes`, or the model's name in tokenizer.json, such as BPE."""
        return BYTES if self._definition == json.loads(_bytes_text()) else str(self._definition["model"].get("type", "BPE"))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest unsigned little-endian type that holds every id."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    def record(self) -> TokenizerRecord:
        """Return the tokenizer's record for the manifest of prepared data."""
        return TokenizerRecord(
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            end_of_text=self.end_of_text,
            end_of_text_token=self.end_of_text_token,
        )

    def encode(self, text: str) -> Ids:
        """Return the ids of `text`, int64 [tokens]; no special token is added."""
        return self._encode(text).astype(np.int64)

    def encode_documents(
        self, texts: Iterable[str], progress: Callable[[int], None] | None = None, *, engine: Engine = "auto"
    ) -> Iterator[npt.NDArray[np.unsignedinteger[Any]]]:
        """Yield the ids of each text in order, [tokens] of `dtype`, encoding batches on all cores.

        `auto` encodes with tiktoken if its ids equal those of tokenizers on the first texts, up to 262,144 characters or 4,096 texts.
        `progress` is called with the number of characters of each finished batch.
        """
        stream = iter(texts)
        head = _take(stream, characters=_COMPARED_CHARACTERS, documents=_BATCH_DOCUMENTS)
        encode_batch = self._batch_encoder(engine, head)
        batches = chain([head], iter(lambda: _take(stream, characters=_BATCH_CHARACTERS, documents=_BATCH_DOCUMENTS), []))
        for batch in batches:
            yield from encode_batch(batch)
            if progress is not None:
                progress(sum(map(len, batch)))

    def decode(self, ids: Iterable[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids, including special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._engine.decode([int(number) for number in ids], skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if there is no such token."""
        return self._engine.token_to_id(token)

    def save(self, folder: Path | str, more: Mapping[str, Any] | None = None) -> Path:
        """Write tokenizer.json, and a tokenizer_config.json that names the end-of-text token, for transformers. `more`: further values for
        tokenizer_config.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_of_text_token,
            "clean_up_tokenization_spaces": False,
        } | dict(more or {})
        disk.write_whole(folder / TOKENIZER_CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        disk.write_whole(folder / TOKENIZER_FILE, self._text)
        return folder / TOKENIZER_FILE

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:12]})"

    def _encode(self, text: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        if self.kind == BYTES:
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        return np.array(self._engine.encode(text, add_special_tokens=False).ids, self.dtype)

    def _batch_encoder(
        self, engine: Engine, head: Sequence[str]
    ) -> Callable[[Sequence[str]], Iterable[npt.NDArray[np.unsignedinteger[Any]]]]:
        if self.kind == BYTES:
            return lambda batch: map(self._encode, batch)
        fast = None if engine == "tokenizers" else reproduce(self._definition)
        if fast is not None and _equal(fast.encode(head), self._encode_slowly(head)):
            return lambda batch: [
                self._encode(text) if ids is None else ids.astype(self.dtype)
                for text, ids in zip(batch, fast.encode(batch), strict=True)
            ]
        if engine == "tiktoken":
            raise DataError(f"tiktoken does not give the same ids as {self!r}. Encode with engine='auto' or 'tokenizers'.")
        return self._encode_slowly

    def _encode_slowly(self, batch: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        found = self._engine.encode_batch_fast(list(batch), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in found]


def load(path_or_name: Path | str, *, end_of_text: str | None = None, config: Path | None = None) -> Tokenizer:
    """Load a tokenizer: `bytes`, a tokenizer.json, or a folder that holds one. Raises DataError if the tokenizer is missing or unusable.

    The end-of-text token is `end_of_text`, else eos_token in `config` (default: the tokenizer_config.json in the same folder), else one of
    the usual names.
    """
    if str(path_or_name) == BYTES:
        return Tokenizer(_bytes_text(), end_of_text=end_of_text, origin=BYTES)
    path = Path(path_or_name)
    if path.is_dir():
        path, config = (
            epochs.newest_or_plain(path, TOKENIZER_FILE),
            config or epochs.newest_or_plain(path, TOKENIZER_CONFIG_FILE),
        )
    if not path.is_file():
        raise DataError(
            f"The tokenizer {str(path_or_name)!r} was not found ({path.absolute()} does not exist). Give a tokenizer.json, "
            f"a folder that holds one, or {BYTES!r}; `megalith tokenizer train` makes one."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a tokenizer.json: it is not UTF-8 text ({error.reason}).") from error
    return Tokenizer(
        text, end_of_text=end_of_text or _configured_end(config or path.with_name(TOKENIZER_CONFIG_FILE)), origin=str(path)
    )


def copy(source: Path, folder: Path, *, warn: Callable[[str], object] | None = None, epoch: int = 0) -> None:
    """Copy those files of the tokenizer in `source` that are missing in `folder` or have another size there, so that `folder` can
    be used by itself. If a folder with content has the name of a file to copy, `warn` is called; without `warn` IsADirectoryError
    is raised. `epoch`: the number in the file names of a run folder's owner."""
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        own, *plain = epochs.names(folder, name, epoch)
        if disk.is_file(source / name):
            _copy_one(source / name, own, warn)
            for kept in plain:  # for people, as `megalith.epochs` says
                _copy_one(source / name, kept, lambda _: None)


def _copy_one(found: Path, kept: Path, warn: Callable[[str], object] | None) -> None:
    if disk.is_file(kept) and kept.stat().st_size == found.stat().st_size:
        return
    try:
        disk.write_whole(kept, found.read_bytes())
    except IsADirectoryError:
        if warn is None:
            raise
        warn(
            f"{kept} is a folder, so the run keeps no copy of {found}. `megalith generate` needs a copy of the tokenizer "
            f"once the prepared data is gone: remove the folder {kept}"
        )


def train(
    sources: Sequence[str | Source],
    vocab_size: int,
    out: Path | str,
    *,
    reading: Reading = DEFAULT_READING,
    min_frequency: int = 2,
    overwrite: bool = False,
    progress: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE on the sources' documents and save it in the folder `out`. The same sources give the same tokenizer.

    Text is split by GPT-2's pattern; the vocabulary holds `<|endoftext|>` (id 0), all bytes, and merges of pairs that occur at least
    `min_frequency` times, so a small text may give fewer than `vocab_size` tokens. Raises DataError if the vocabulary is too small, a
    source cannot be read, or `out` holds another tokenizer.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size={vocab_size} is too small: a byte-level BPE holds 256 bytes and {END_OF_TEXT}. "
            f"Use {SMALLEST_VOCABULARY} or more (4096 for a few megabytes of text)."
        )
    found = parse_sources(sources)
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    merging = list[TaskID]()
    with bars(progress) as shown:
        for source in found:
            held = find(source, reading)
            shown.print_left_out(source.path, held.left_out() if held else ())
        reader = shown.start("reading text", total=sum(size(source, reading) for source in found))

        def texts() -> Iterator[str]:
            for source in found:
                yield from documents(source, reading, lambda count: shown.advance(reader, count))
            shown.finish(reader)
            merging.append(shown.start("learning merges", total=None))

        engine.train_from_iterator(texts(), trainer)
        for bar in merging:
            shown.finish(bar)
    learned = Tokenizer(engine.to_str(pretty=True), end_of_text=END_OF_TEXT)
    _refuse_another(Path(out), learned, overwrite=overwrite)
    learned.save(out)
    return learned


def _refuse_another(folder: Path, learned: Tokenizer, *, overwrite: bool) -> None:
    path = folder / TOKENIZER_FILE
    if not overwrite and path.exists() and path.read_text(encoding="utf-8") != learned._text:
        raise DataError(f"{path} already holds another tokenizer. Choose another folder, or use --overwrite.")


def _definition(text: str, origin: str) -> dict[str, Any]:
    try:
        definition = json.loads(text)
    except ValueError as error:
        raise DataError(f"{origin} is not a tokenizer.json: it is not JSON ({error}).") from error
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict) or "vocab" not in definition["model"]:
        held = ", ".join(list(definition)[:8]) if isinstance(definition, dict) else type(definition).__name__
        raise DataError(f"{origin} is not a tokenizer.json: it has no model with a vocab (its keys: {held}).")
    return definition


def _end(ids: dict[str, int], wanted: str | None, origin: str) -> str:
    if wanted is not None and wanted not in ids:
        raise DataError(f"{origin} has no token {wanted!r} to end documents with. Name one of the tokenizer's {len(ids)} tokens.")
    found = wanted or next((name for name in _ENDS if name in ids), None)
    if found is None:
        raise DataError(
            f"{origin} has none of the tokens that usually end a document ({', '.join(_ENDS)}). Name the tokenizer's "
            f"end-of-text token with end_of_text (--end-of-text), or as eos_token in a {TOKENIZER_CONFIG_FILE} in the same "
            "folder."
        )
    return found


def _configured_end(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_bytes()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}. Correct or remove this file.") from error
    return token.get("content") if isinstance(token, dict) else token


def _bytes_text() -> str:
    """Return a tokenizer.json for bytes: ids are the bytes, there are no merges, and id 256 ends a document."""
    ids = dict(sorted(byte_characters().items(), key=lambda item: item[1]))
    engine = tokenizers.Tokenizer(models.BPE(ids, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END_OF_TEXT])
    return engine.to_str(pretty=True)


def _equal(fast: Sequence[npt.NDArray[Any] | None], slow: Sequence[npt.NDArray[Any]]) -> bool:
    """True if all texts that the fast engine encoded have the same ids from both engines, and the fast engine encoded at least one text."""
    compared = [np.array_equal(ids, others) for ids, others in zip(fast, slow, strict=True) if ids is not None]
    return all(compared) and bool(compared)


def _take(stream: Iterator[str], *, characters: int, documents: int) -> list[str]:
    """Return the next texts, until they have `characters` characters or are `documents` texts; empty at the end."""
    taken: list[str] = []
    for text in stream:
        taken.append(text)
        characters -= len(text)
        if characters <= 0 or len(taken) >= documents:
            break
    return taken
