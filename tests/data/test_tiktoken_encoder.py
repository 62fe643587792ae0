import json

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from megalith.data.bundled import austen
from megalith.data.errors import DataError
from megalith.data.tiktoken_encoder import reproduce
from megalith.data.tokenizer import END_OF_TEXT, Tokenizer

# Llama 3's pattern (the tokenizer.json of Llama 3.1)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDING = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _trained(splitter: pre_tokenizers.PreTokenizer, text: str = "") -> Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer, engine.decoder = splitter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    engine.train_from_iterator([text or austen()[:40_000]], trainer)
    return Tokenizer(engine.to_str())


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), ENDING])


@pytest.mark.slow
@pytest.mark.parametrize("splitter", [pre_tokenizers.ByteLevel(add_prefix_space=False), _split(LLAMA3)], ids=["gpt2", "llama3"])
def test_tiktoken_gives_the_ids_of_tokenizers_on_the_bundled_novels(splitter):
    tokenizer = _trained(splitter)
    text = austen()[::40] + austen()[-600_000:]  # letters in unnatural order, and the prose
    texts = [text[start : start + 40_000] for start in range(0, len(text), 40_000)]
    fast = tokenizer.encode_documents(texts, engine="tiktoken")
    slow = tokenizer.encode_documents(texts, engine="tokenizers")
    assert all(np.array_equal(*pair) for pair in zip(fast, slow, strict=True))


def _with(tokenizer: Tokenizer, **changes: object) -> dict:
    definition = json.loads(tokenizer._text)
    return {**definition, **{key: value for key, value in changes.items() if key in definition}} | {
        "model": definition["model"] | {key: value for key, value in changes.items() if key not in definition}
    }


def test_what_tiktoken_has_no_way_to_do_is_left_to_tokenizers(tokenizer):
    merges = json.loads(tokenizer._text)["model"]["merges"]
    added = {
        "id": 7,
        "content": "x",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": False,
    }
    assert reproduce(_with(tokenizer)) is not None
    assert reproduce(_with(tokenizer, normalizer={"type": "NFC"})) is None
    assert reproduce(_with(tokenizer, merges=[merges[1], merges[0], *merges[2:]])) is None
    assert reproduce(_with(tokenizer, merges=merges[:-1])) is None, "a token that no merge makes"
    assert reproduce(_with(tokenizer, merges=merges[:-1], ignore_merges=True)) is not None
    assert reproduce(_with(tokenizer, dropout=0.1)) is None
    assert reproduce(_with(tokenizer, added_tokens=[added])) is None
    assert reproduce(_with(tokenizer, pre_tokenizer={"type": "Whitespace"})) is None
    assert reproduce(_with(tokenizer, pre_tokenizer=None)) is None


@pytest.mark.slow
def test_a_tokenizer_tiktoken_cannot_do_still_encodes_in_bulk():
    tokenizer = _trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), ENDING]))
    assert [ids.tolist() for ids in tokenizer.encode_documents(["in 1816", "x"])] == [
        tokenizer.encode("in 1816").tolist(),
        tokenizer.encode("x").tolist(),
    ]
    with pytest.raises(DataError, match="tiktoken does not give the same ids"):
        list(tokenizer.encode_documents(["a"], engine="tiktoken"))


def test_text_that_a_pattern_leaves_out_is_not_lost_even_far_from_the_compared_part():
    tokenizer = _trained(_split(r"\p{L}+"))  # tiktoken drops what no branch matches
    texts = ["letters" * 40_000, "two words", "one"]
    found = [tokenizer.decode(ids) for ids in tokenizer.encode_documents(texts, engine="tiktoken")]
    assert found == texts


@pytest.mark.slow
def test_a_million_blanks_do_not_stop_the_encoder(tokenizer):
    texts = ["a b", "x" + " " * 1_000_000 + "y", "c"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_documents(texts, engine="tiktoken")] == texts
