"""Encodes with tiktoken where it gives the same ids as `tokenizers`, several times faster.

tiktoken reproduces a byte-level BPE that splits text by one regular expression and whose merges have tokens with rising ids: then "merge
the pair with the lowest rank" (Sennrich et al. 2016) and "merge the pair whose token has the lowest id" (tiktoken) are the same rule.
Regular expression engines may differ, so callers compare the ids of tiktoken and `tokenizers` on some text.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

# What `ByteLevel(use_regex=True)` of tokenizers splits by: GPT-2's pattern (Radford et al. 2019).
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# tiktoken's regular expressions panic on white space longer than some hundred thousand characters; blocks of this many
# are looked for, so a run of twice the length is always found.
_BLANK_BLOCK = 1 << 14


class TiktokenEncoder:
    """A tiktoken encoding that returns None for texts which it cannot encode."""

    def __init__(self, encoding: tiktoken.Encoding, ranks: dict[bytes, int]) -> None:
        self._encoding = encoding
        self._lengths = np.zeros(max(ranks.values()) + 1, np.int64)
        self._lengths[list(ranks.values())] = [len(token) for token in ranks]

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64] | None]:
        """Encode texts on all cores, and return the ids of each; None for a text on which tiktoken would fail or drop bytes."""
        easy = ["" if _has_long_blank(text) else text for text in texts]
        found = [np.array(ids, np.int64) for ids in self._encoding.encode_ordinary_batch(easy, num_threads=os.cpu_count() or 1)]
        # A pattern may leave text unmatched, which tiktoken drops and `tokenizers` keeps: count the bytes.
        whole = (int(self._lengths[ids].sum()) == len(text.encode()) for ids, text in zip(found, texts, strict=True))
        return [ids if kept else None for ids, kept in zip(found, whole, strict=True)]


def _has_long_blank(text: str) -> bool:
    return any(text[start : start + _BLANK_BLOCK].isspace() for start in range(0, len(text) - _BLANK_BLOCK + 1, _BLANK_BLOCK))


def byte_characters() -> dict[str, int]:
    """Return the map from GPT-2's printable characters to the bytes for which they stand."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def reproduce(definition: dict[str, Any]) -> TiktokenEncoder | None:
    """Return a tiktoken encoder for a tokenizer.json, or None if tiktoken cannot give the same ids."""
    model = definition["model"]
    plain = (
        model.get("type", "BPE") == "BPE"
        and definition.get("normalizer") is None
        and not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
        # `tokenizers` finds added tokens in any text before it splits, unless they are special
        and all(token["special"] for token in definition.get("added_tokens", []))
    )
    pattern = _pattern(definition.get("pre_tokenizer")) if plain else None
    ranks = _ranks(definition) if pattern is not None else None
    if pattern is None or ranks is None:
        return None
    try:
        encoding = tiktoken.Encoding("megalith", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError:  # a pattern only the other engine knows
        return None
    return TiktokenEncoder(encoding, ranks)


def _pattern(splitter: dict[str, Any] | None) -> str | None:
    """Return the regular expression by which a pre-tokenizer splits text; None if it does more than split by one expression."""
    steps = splitter.get("pretokenizers", []) if splitter and splitter["type"] == "Sequence" else [splitter]
    last, first = (steps[-1], steps[0]) if steps else (None, None)
    if last is None or first is None or last["type"] != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    if len(steps) != 2 or last.get("use_regex", True) or first["type"] != "Split":
        return None
    cuts = (first.get("behavior"), first.get("invert", False))
    return first["pattern"].get("Regex") if cuts in (("Isolated", False), ("Removed", True)) else None


def _ranks(definition: dict[str, Any]) -> dict[bytes, int] | None:
    """Return token bytes -> id; None if the ids do not rise with the merges, or no merge produces some token."""
    model, to_byte = definition["model"], byte_characters()
    added = {token["content"] for token in definition.get("added_tokens", [])}
    vocab = {text: number for text, number in model["vocab"].items() if text not in added}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    made = [vocab.get("".join(pair)) for pair in pairs]
    if None in made or made != sorted(set(made), key=lambda number: number or 0):
        return None
    unreached = {text for text, number in vocab.items() if len(text) > 1} - {"".join(pair) for pair in pairs}
    if unreached and not model.get("ignore_merges", False):
        return None
    if not (to_byte.keys() <= vocab.keys() and all(character in to_byte for text in vocab for character in text)):
        return None
    return {bytes(to_byte[character] for character in text): number for text, number in vocab.items()}
