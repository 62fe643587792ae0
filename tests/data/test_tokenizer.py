import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from megalith.data.bundled import austen
from megalith.data.errors import DataError
from megalith.data.manifest import TOKENIZER_FILE
from megalith.data.tokenizer import END_OF_TEXT, Tokenizer, copy, load, train

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BYTE_LEVEL = load("bytes")


def _words(words: dict[str, int]) -> str:
    engine = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    return engine.to_str()


@settings(max_examples=60, deadline=None)
@given(TEXT)
def test_any_text_comes_back_from_its_bytes(text):
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids) == text
    assert ids.tolist() == list(text.encode())


@settings(max_examples=60, deadline=None)
@given(TEXT)
def test_bytes_are_what_their_tokenizer_json_says(text):
    assert tokenizers.Tokenizer.from_str(BYTE_LEVEL._text).encode(text.replace(END_OF_TEXT, "")).ids == list(
        text.replace(END_OF_TEXT, "").encode()
    )


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_any_text_comes_back_from_its_merges(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int64
    assert len(ids) <= len(text.encode())


@pytest.mark.parametrize("kind", ["bytes", "BPE"])
def test_text_that_spells_the_end_of_text_does_not_end_it(kind, tokenizer):
    chosen = BYTE_LEVEL if kind == "bytes" else tokenizer
    text = f"before {END_OF_TEXT} after"
    assert chosen.kind == kind
    assert chosen.end_of_text not in chosen.encode(text)
    assert all(chosen.end_of_text not in ids for ids in chosen.encode_documents([text]))
    assert chosen.decode(chosen.encode(text)) == text
    assert chosen.decode([chosen.end_of_text]) == END_OF_TEXT


@pytest.mark.parametrize("engine", ["auto", "tiktoken", "tokenizers"])
def test_documents_get_the_ids_of_each_text_alone_whatever_the_engine(engine, tokenizer):
    texts = ["", "One.", austen()[500_000:530_000], "ünï 你好 🙂\n\n\n  x\t", END_OF_TEXT]
    told: list[int] = []
    found = list(tokenizer.encode_documents(texts, told.append, engine=engine))
    assert [ids.tolist() for ids in found] == [tokenizer.encode(text).tolist() for text in texts]
    assert all(ids.dtype == np.uint16 for ids in found)
    assert sum(told) == sum(map(len, texts))


def test_tokenizer_trained_twice_is_the_same(tokenizer, novel, tmp_path):
    again = train([str(novel)], 400, tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.end_of_text) == (400, 0)
    assert load(tmp_path).fingerprint == again.fingerprint


def test_training_says_what_is_wrong(novel, tmp_path):
    with pytest.raises(DataError, match=r"vocab_size=256 is too small.*Use 257"):
        train([str(novel)], 256, tmp_path)
    with pytest.raises(DataError, match=r"gone.txt"):
        train(["gone.txt"], 300, tmp_path)
    assert not any(tmp_path.iterdir())


def test_another_tokenizer_is_overwritten_only_when_told(novel, tmp_path):
    first = train([str(novel)], 257, tmp_path)
    assert train([str(novel)], 257, tmp_path).fingerprint == first.fingerprint
    with pytest.raises(DataError, match="already holds another tokenizer"):
        train([str(novel)], 258, tmp_path)
    assert load(tmp_path).fingerprint == first.fingerprint
    assert train([str(novel)], 258, tmp_path, overwrite=True).fingerprint == load(tmp_path).fingerprint


def test_a_small_text_gives_fewer_tokens_than_asked_for(tmp_path):
    (tmp_path / "x.txt").write_text("ab ab ab")
    assert train([str(tmp_path / "x.txt")], 5000, tmp_path / "out").vocab_size < 270


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "it is not JSON"),
        ("[1]", "no model with a vocab"),
        ('{"vocab": {}, "merges": []}', r"no model with a vocab \(its keys: vocab, merges\)"),
        ('{"model": {"type": "New", "vocab": {}}}', "not a tokenizer.json that version"),
        (_words({"?": 0, "a": 1}), "none of the tokens that usually end a document"),
    ],
)
def test_what_is_not_a_tokenizer_is_refused_with_the_reason(content, says, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=says):
        load(tmp_path)


def test_a_missing_tokenizer_says_what_can_be_given(tmp_path):
    for missing in (tmp_path, tmp_path / "t.json", "gpt5"):
        with pytest.raises(DataError, match=r"was not found.*'bytes'"):
            load(missing)


def test_the_end_of_text_is_the_one_named_or_the_one_configured(tmp_path):
    (tmp_path / "tokenizer.json").write_text(_words({"?": 0, "</s>": 1, "stop": 2, "halt": 3}))
    assert load(tmp_path).end_of_text == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "stop"}}))
    assert load(tmp_path).end_of_text == 2
    assert load(tmp_path, end_of_text="halt").end_of_text == 3
    with pytest.raises(DataError, match="no token 'end'"):
        load(tmp_path, end_of_text="end")


def test_saving_keeps_the_end_of_text_and_the_fingerprint(tmp_path):
    first = Tokenizer(_words({"?": 0, "</s>": 1, "stop": 2}), end_of_text="stop")
    first.save(tmp_path)
    assert (load(tmp_path).end_of_text, load(tmp_path).fingerprint) == (2, first.fingerprint)


def test_the_fingerprint_is_of_what_is_encoded_not_of_how_it_is_written():
    text = _words({"?": 0, "</s>": 1, "a": 2, "b": 3})
    definition = json.loads(text)
    padded = json.dumps(
        definition | {"truncation": {"max_length": 1, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}
    )
    assert Tokenizer(padded).fingerprint == Tokenizer(text).fingerprint
    assert Tokenizer(padded).encode("a b a").tolist() == [2, 3, 2]
    swapped = _words({"?": 0, "</s>": 1, "a": 3, "b": 2})
    assert Tokenizer(swapped).fingerprint != Tokenizer(text).fingerprint
    assert Tokenizer(text, end_of_text="a").fingerprint != Tokenizer(text).fingerprint


@pytest.mark.slow
def test_a_vocabulary_over_65536_is_stored_in_four_bytes():
    large = Tokenizer(_words({"?": 0, "</s>": 1} | {f"w{n}": n for n in range(2, 70_000)}))
    assert large.dtype == np.dtype("<u4")
    assert next(iter(large.encode_documents(["w69999 w2"]))).tolist() == [69_999, 2]
    assert Tokenizer(_words({"?": 0, "</s>": 65_535})).dtype == np.dtype("<u2")


def test_a_folder_in_the_place_of_a_runs_copy_gives_way_or_is_reported(tmp_path):
    """A rank that starts again must not fail because of it."""
    source, run = tmp_path / "data", tmp_path / "run"
    source.mkdir()
    (source / TOKENIZER_FILE).write_text("{}")
    (run / TOKENIZER_FILE).mkdir(parents=True)
    warned = []
    copy(source, run, warn=warned.append)
    assert (run / TOKENIZER_FILE).read_text() == "{}" and not warned
    (run / TOKENIZER_FILE).unlink()
    (run / TOKENIZER_FILE / "mine").mkdir(parents=True)
    copy(source, run, warn=warned.append)
    assert len(warned) == 1 and "remove the folder" in warned[0] and (run / TOKENIZER_FILE / "mine").is_dir()


def test_the_folder_of_a_run_has_its_newest_owners_tokenizer_and_a_copy_for_people(tmp_path, monkeypatch):
    for name, last in {"first": 8, "second": 9}.items():
        Tokenizer(_words({"?": 0, "</s>": last})).save(tmp_path / name)
    run = tmp_path / "run"
    run.mkdir()
    (run / "events-1.jsonl").touch()
    copy(tmp_path / "first", run, epoch=1)
    assert (run / TOKENIZER_FILE).is_file() and (run / "tokenizer-1.json").is_file()
    copy(tmp_path / "second", run)  # by an earlier owner that wakes up
    assert load(run).vocab_size == 9

    def refuses(folder):
        raise PermissionError(folder)

    monkeypatch.setattr(type(run), "iterdir", refuses)
    assert load(tmp_path / "second").vocab_size == 10, "a folder that one may enter but not list"
