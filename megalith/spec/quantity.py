"""Amounts as people write them: 8k, 16M, 15T, 1.5e9, "500M tokens"."""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

UNITS = ("steps", "samples", "tokens")
ROUNDING = 1e-12
"""Relative error up to which a product such as 1.005 x 1000 counts as a whole number."""


class Thousand(NamedTuple):
    """Marks a field with a whole number that users may write as text such as "8k", in which K, M, G and T are powers of
    `base`."""

    base: int


def quantity(text: str, *, thousand: int = 1000) -> float | None:
    """Convert a text such as 15T, 300B, 1.5e9 or 4M to a number. K, M, B (or G) and T are powers of `thousand`; Ki, Mi, Gi and Ti
    are powers of 1024. Return None for text that is not a number above 0, or is too large for a float."""
    found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*(?:([KMGBT])(i)?)?", text.strip(), re.IGNORECASE)
    if not found:
        return None
    number = float(found[1].replace(",", "").replace("_", ""))
    power = {"": 0, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}[(found[2] or "").upper()]
    number *= (1024 if found[3] else thousand) ** power
    return number if 0 < number < math.inf else None


def whole(text: str, mark: Thousand) -> int | None:
    """Convert a text with a letter or exponent, such as "8k" or "1e5", to a whole number; None for other text, and for a number
    that is not whole."""
    number = quantity(text, thousand=mark.base) if re.search(r"[a-zA-Z]", text) else None
    return int(number) if number is not None and number == int(number) else None


@dataclass(frozen=True)
class Amount:
    """A length of training: a whole number of steps, samples or tokens."""

    number: int
    unit: str

    @classmethod
    def read(cls, value: Any) -> "Amount | None":
        """Convert a text such as "500M tokens" to an amount; None for any other value, such as "2.5 steps"."""
        if not isinstance(value, str):
            return None
        number, _, unit = value.strip().rpartition(" ")
        unit = unit.lower() if unit.lower().endswith("s") else f"{unit.lower()}s"
        found = quantity(number)
        if found is None or unit not in UNITS or not math.isclose(found, round(found), rel_tol=ROUNDING):
            return None
        return cls(round(found), unit)
