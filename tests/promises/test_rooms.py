"""A module can be read in one sitting, and a room can be surveyed at a glance."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "megalith"
MOST_LINES, MOST_MODULES = 450, 26


def test_no_module_is_longer_than_450_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py")}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}, "split them along their subjects"


def test_no_room_has_more_than_26_modules() -> None:
    modules = Counter(str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    assert not {room: count for room, count in modules.items() if count > MOST_MODULES}, "give a subject a room of its own"
