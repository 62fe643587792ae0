import json
import shutil

import pytest

from megalith.data.errors import AwayDataError, DataError
from megalith.data.manifest import check_copies, check_sizes, check_tokenizer, read_manifest, tokenizer_fingerprint
from megalith.data.stream import Stream


def test_a_manifest_reads_back_as_it_was_written(prepared):
    manifest = read_manifest(prepared)
    assert manifest.text() == (prepared / "manifest.json").read_text()
    assert str(prepared.parent) not in manifest.text()


def test_its_digest_changes_with_any_value_in_it(prepared, tmp_path):
    content = json.loads((prepared / "manifest.json").read_text())
    content["domains"]["words"]["validation"]["shards"][0]["sha256"] = "0" * 64
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert read_manifest(tmp_path).sha256 != read_manifest(prepared).sha256


def test_every_missing_and_every_short_file_is_named_at_once(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    (folder / "novel-train-00000.bin").unlink()
    short = folder / "words-train-00000.idx"
    short.write_bytes(short.read_bytes()[:-8])
    with pytest.raises(DataError) as error:
        check_sizes(folder, manifest)
    assert "novel-train-00000.bin is missing" in str(error.value)
    assert (
        f"words-train-00000.idx has {short.stat().st_size} bytes, but {short.stat().st_size + 8} according to the manifest"
        in str(error.value)
    )


def test_copies_that_are_away_are_waited_for_and_copies_of_other_data_are_not(prepared, tmp_path):
    gone, empty, other = tmp_path / "gone", tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    manifest = read_manifest(prepared)
    with pytest.raises(AwayDataError, match=f"{gone} does not exist.*remove the copy from data.copies") as away:
        Stream(prepared, seq_len=8, copies=[prepared, gone])
    assert away.value.path == gone / "manifest.json"
    with pytest.raises(AwayDataError, match=r"gone does not exist[^$]*empty has no manifest\.json") as away:
        check_copies(prepared, manifest, [gone, empty])
    assert len(away.value.parts) == 2
    shutil.copytree(prepared, other)
    (other / "manifest.json").write_text(manifest.model_copy(update={"sources": ()}).text())
    with pytest.raises(DataError, match=r"gone does not exist[^$]*other holds different data") as wrong:
        check_copies(prepared, manifest, [gone, other])
    assert not isinstance(wrong.value, AwayDataError)


def test_a_tokenizer_that_is_no_json_is_refused(prepared, tmp_path):
    manifest = read_manifest(prepared)
    check_tokenizer(prepared, manifest)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        check_tokenizer(tmp_path, manifest)


def test_a_fingerprint_does_not_depend_on_the_order_of_keys():
    assert tokenizer_fingerprint({"a": 1, "b": {"c": 2, "d": 3}}, 0) == tokenizer_fingerprint({"b": {"d": 3, "c": 2}, "a": 1}, 0)
    assert tokenizer_fingerprint({"a": 1}, 0) != tokenizer_fingerprint({"a": 1}, 1)
