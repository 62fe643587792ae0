"""A module can be read in one sitting, a room can be surveyed at a glance, and the way to the update is short."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "megalith"
MAX_LINES, MAX_MODULES = 450, 26
MAX_FILES, MAX_FILES_IN_A_RANK = 33, 22  # from the command to the update, and from a rank's `main`


def test_no_module_is_longer_than_450_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py")}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}, "split them along their subjects"


def test_no_room_has_more_than_26_modules() -> None:
    modules = Counter(str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    assert not {room: count for room, count in modules.items() if count > MAX_MODULES}, "give a subject a room of its own"


def test_the_files_from_the_command_to_the_update_are_there_and_as_many_as_the_page_says() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("### From the command to the update\n")[2].partition("\n## ")[0]
    named = [re.findall(r"`([\w/]+)`", item) for item in re.split(r"\n\d\. ", section)[1:]]
    files = [file for item in named for file in item]
    assert not [file for file in files if not (ROOT / f"{file}.py").is_file()]
    in_a_rank = files[files.index("train/run") :]
    assert [int(number) for number in re.findall(r"\b(\d+)(?: files| of them)", section)] == [len(files), len(in_a_rank)]
    assert len(files) <= MAX_FILES and len(in_a_rank) <= MAX_FILES_IN_A_RANK, "merge what belongs together"
