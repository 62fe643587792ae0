"""Named models: `[model] preset = "llama3-8b"` stands for a line of presets.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from megalith.spec.llama import Llama


@dataclass(frozen=True)
class Preset:
    """A named model: the keys of `[model]` it stands for, and where its numbers come from."""

    name: str
    family: str
    source: str
    values: dict[str, Any]

    def build(self) -> Llama:
        """The sizes as a spec; its name is the preset's."""
        return Llama.model_validate(self.values)


@cache
def presets() -> dict[str, Preset]:
    """Every preset by name, in the order of the table."""
    table = tomllib.loads(files("megalith.spec").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {
        name: Preset(name, family, rows["source"], {"name": name} | rows["shared"] | sizes)
        for family, rows in table.items()
        for name, sizes in rows["sizes"].items()
    }
