"""Rows of a file of measurements, and the bytes that they report."""

import csv
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

GIB = 2**30

DECIMAL = ("mbridge-skills",)
"""Source groups whose GB are 10^9 bytes: Megatron-Bridge's log divides torch's bytes by 1e9 (training/utils/train_utils.py,
report_memory) and rounds to five digits, as in these rows."""


@dataclass(frozen=True)
class Row:
    """One published configuration, by the columns of the file."""

    columns: dict[str, str]

    def text(self, name: str) -> str:
        """A column as text; "" if it is empty."""
        return self.columns.get(name, "") or ""

    def whole(self, name: str) -> int | None:
        """A column as a whole number; None if it is empty."""
        return int(float(text)) if (text := self.text(name)) else None

    def number(self, name: str) -> float | None:
        """A column as a number; None if it is empty."""
        return float(text) if (text := self.text(name)) else None

    @property
    def name(self) -> str:
        return self.text("id")

    @property
    def group(self) -> str:
        return self.text("source_group")

    @cached_property
    def options(self) -> dict[str, Any]:
        """Further options that the source states, beyond the columns."""
        return json.loads(self.text("options") or "{}")

    @cached_property
    def model(self) -> dict[str, Any]:
        """Sizes of the model; empty if the source does not state them."""
        return json.loads(self.text("model_spec") or "{}")

    @property
    def scored(self) -> bool:
        """True if the row was measured, is the best version of its configuration, and is not flagged as contradictory."""
        return self.text("primary") == "1" and self.text("value_kind") == "measured" and not self.text("flag")

    @property
    def ran_out(self) -> bool:
        """True if the source states that the configuration ran out of memory."""
        return self.text("primary") == "1" and self.text("value_kind") == "measured-OOM"

    @property
    def memory(self) -> float | None:
        """Peak bytes of the rank that the source reports. A value in GB is read as GiB, torch's unit, except in groups of DECIMAL. Bytes
        reserved by torch's allocator are not a peak, because the allocator keeps freed memory."""
        found = None if "max reserved" in self.text("peak_mem_kind") else self.number("peak_mem_gib")
        printed = "gb as printed" in self.text("peak_mem_kind").lower()
        return None if found is None else found * (1e9 if printed and self.group in DECIMAL else GIB)


def read(path: Path | None = None) -> list[Row]:
    """Read the rows of a file in the format of the bundled file; None: the bundled file."""
    source = files("megalith.planner.published").joinpath("measurements.csv") if path is None else path
    with source.open(encoding="utf-8") as file:
        return [Row(columns) for columns in csv.DictReader(file)]


class CannotSayError(Exception):
    """The reason why a row has no workload."""
