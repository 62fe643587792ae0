"""Measures how long work on a device takes, without making the device wait."""

import time
from typing import Any

import torch


class Clock:
    """Records marks in the stream of a device's work; the seconds between two marks can be read once the device has passed both."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark: the host's time on a CPU, an event in the stream on a GPU."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. A GPU must have passed the later mark, so synchronise first."""
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start
