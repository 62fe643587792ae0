"""Named models: `[model] preset = "llama3-8b"` takes its values from presets.toml."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from megalith.spec.families import Model, read


@dataclass(frozen=True)
class Preset:
    """A named model: its values for the keys of `[model]`, and their source."""

    name: str
    group: str
    source: str
    values: dict[str, Any]

    def build(self) -> Model:
        """The preset's sizes as a spec of its family."""
        return read(self.values)


def meant(word: str) -> list[str]:
    """Return the presets whose names contain every piece of `word`, such as "7b" or "llama 8b"."""
    pieces = [piece for piece in re.split(r"[-_ /]+", word.lower()) if piece]
    names = {name: re.split(r"[-_]", name) for name in presets()}
    return [name for name, parts in names.items() if pieces and all(_is_piece(piece, parts) for piece in pieces)]


def _is_piece(piece: str, parts: list[str]) -> bool:
    return piece in parts if piece[0].isdigit() else any(part.startswith(piece) for part in parts)


@cache
def presets() -> dict[str, Preset]:
    """Every preset by name, in the order of the table."""
    table = tomllib.loads(files("megalith.spec").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {
        name: Preset(name, group, rows["source"], {"family": rows["family"], "name": name} | rows["shared"] | sizes)
        for group, rows in table.items()
        for name, sizes in rows["sizes"].items()
    }
