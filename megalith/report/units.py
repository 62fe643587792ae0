"""Numbers in human-readable form, and numbers for JSON."""

from math import exp, isfinite, log2
from typing import Any

NOTHING = "–"
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 node", "2 nodes", "2 batches"."""
    return f"{number:,} {noun}{('es' if noun.endswith('tch') else 's') * (number != 1)}"


def count(value: float | None) -> str:
    """A number with at most four digits and a letter for the power of a thousand: 950, 12.3k, 8.03B."""
    if value is None or not isfinite(value):
        return NOTHING if value is None else str(value)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.99995:
            return f"{_digits(value / size)}{letter}"
    return _digits(value)


def memory(size: float | None) -> str:
    """Bytes in binary units: 512 B, 1.5 MiB, 80 GiB."""
    if size is None:
        return NOTHING
    for unit in BINARY:
        if abs(size) < 1023.95 or unit == "TiB":
            return f"{_digits(size)} {unit}"
        size /= 1024
    raise AssertionError(size)


def memory_unit(most: float) -> tuple[str, float]:
    """Return the binary unit that suits sizes up to `most`, and its number of bytes, so that all ticks of an axis use one unit."""
    power = min(int(log2(most) // 10), len(BINARY) - 1) if most >= 1 else 0
    return BINARY[power], 1024.0**power


def duration(seconds: float | None) -> str:
    """Seconds as time: 250 µs, 12.5 ms, 8.2 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    if seconds is None or not isfinite(seconds):
        return NOTHING
    if abs(seconds) < 1:
        return f"{_digits(seconds * 1e6)} µs" if abs(seconds) < 1e-3 else f"{_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss, for a line that is redrawn repeatedly."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def percent(share: float | None) -> str:
    """A fraction as a percentage: 0.3412 is 34.1 %."""
    return NOTHING if share is None or not isfinite(share) else f"{share * 100:.1f} %"


def perplexity(loss: float) -> str:
    """The perplexity of a loss in nats a token: 84.2."""
    return count(exp(min(loss, 700.0)))


def flops(rate: float | None) -> str:
    """FLOP/s with a prefix: 989 TFLOP/s."""
    if rate is None:
        return NOTHING
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if rate >= size:
            return f"{_digits(rate / size)} {letter}FLOP/s"
    return f"{_digits(rate / 1e6)} MFLOP/s"


def _digits(value: float) -> str:
    """Format a number with three significant digits, or all integer digits if it has more, without trailing zeros after the point.
    Numbers below 0.001 have two digits and an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def skipped(lines: int) -> str:
    """Describe how many lines of a log hold no event."""
    return f"{lines} line{'s' * (lines > 1)} of the log without an event"


def finite(value: Any) -> Any:
    """Return a value for JSON, which lacks NaN and infinity: None replaces each number that is not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value
