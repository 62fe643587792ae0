"""Named models: `[model] preset = "llama3-8b"` stands for a line of presets.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from megalith.spec.families import Model, read


@dataclass(frozen=True)
class Preset:
    """A named model: the keys of `[model]` it stands for, and where its numbers come from."""

    name: str
    group: str
    source: str
    values: dict[str, Any]

    def build(self) -> Model:
        """The sizes as a spec of their family; its name is the preset's."""
        return read(self.values)


@cache
def presets() -> dict[str, Preset]:
    """Every preset by name, in the order of the table."""
    table = tomllib.loads(files("megalith.spec").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {
        name: Preset(name, group, rows["source"], {"family": rows["family"], "name": name} | rows["shared"] | sizes)
        for group, rows in table.items()
        for name, sizes in rows["sizes"].items()
    }
