"""Measures the time that Python's garbage collector takes."""

import gc
import time


class Collector:
    """Measures the garbage collections of this process."""

    def __init__(self) -> None:
        self._began, self._seconds = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Return the seconds of garbage collection since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken
