"""Time limits after which ranks count as hung, computed from the silences between heartbeats in the phases of the same run. A
fixed limit would be too short for some runs and too long for others.
"""

from collections import deque
from collections.abc import Sequence

from megalith.fleet.heartbeat import Beat
from megalith.fleet.tiers import Source, Tier
from megalith.spec.fleet import FleetSpec

KEPT = 256  # silences in a phase that the percentile is of
ENOUGH = 3  # silences from which on a limit follows; for the first step of a start one is enough
START_FLOORS = 5  # times hang_floor that a start may take in any case


class Limits:
    """Fixed limits: seconds until all ranks are ready, and seconds without a heartbeat after that (None: unlimited)."""

    def __init__(self, start: float, silence: float | None) -> None:
        self._start, self._silence = start, silence

    def begin(self, source: Source) -> None:
        """Begin a generation of ranks that restores `source`."""

    def note(self, beats: Sequence[Beat]) -> None:
        """Record the newest beats of the ranks."""

    def of_start(self) -> float:
        """Return the allowed seconds from a generation's first heartbeat until all ranks are ready."""
        return self._start

    def of_silence(self, beats: Sequence[Beat]) -> float | None:
        """Return the allowed seconds without a heartbeat of any rank; None: unlimited."""
        return self._silence


class Pace(Limits):
    """Limits computed from the silences between heartbeats in each phase of this run, over all generations of its ranks."""

    def __init__(self, start: float, silence: float | None, fleet: FleetSpec) -> None:
        super().__init__(start, silence)
        self._fleet = fleet
        self._silences: dict[str, deque[float]] = {}  # by phase: the longest between two beats, each time that a rank was in it
        self._longest: dict[int, float] = {}  # by rank, in the phase and step that it is in
        self._starts: dict[Tier | None, deque[float]] = {}  # by the slowest tier they read: a store takes longer than memory
        self._tier: Tier | None = None
        self._last: list[Beat] = []
        self._first_step = -1
        self._began: float | None = None
        self._ready = False

    def begin(self, source: Source) -> None:
        self._tier = source.slowest
        self._last, self._first_step, self._began, self._ready = [], -1, None, False
        self._longest.clear()

    def note(self, beats: Sequence[Beat]) -> None:
        before, self._last = self._last or [Beat()] * len(beats), list(beats)
        for rank, (old, new) in enumerate(zip(before, beats, strict=True)):
            if new.count == old.count:
                continue
            if new.step >= 0 and self._first_step < 0:
                self._first_step = new.step
            if old.count and old.ready:
                self._longest[rank] = max(self._longest.get(rank, 0.0), new.time - old.time)
                if (new.phase, new.step) != (old.phase, old.step):  # else waiting ranks report again and again
                    self._silences.setdefault(self._key(old), deque(maxlen=KEPT)).append(self._longest.pop(rank))
        self._note_start(beats)

    def _note_start(self, beats: Sequence[Beat]) -> None:
        if self._began is None and any(beat.count for beat in beats):
            self._began = min(beat.time for beat in beats if beat.count)
        if self._began is not None and not self._ready and all(beat.ready for beat in beats):
            self._ready = True
            self._starts.setdefault(self._tier, deque(maxlen=KEPT)).append(max(beat.time for beat in beats) - self._began)

    def _key(self, beat: Beat) -> str:
        """Return the key under which a heartbeat's phase is recorded. Phases of a generation's first step have other keys,
        because that step compiles and has cold caches."""
        first = beat.step <= self._first_step
        return f"first {beat.phase}" if first else beat.phase

    def of_start(self) -> float:
        like = self._starts.get(self._tier)
        if not like:
            return self._start
        fleet = self._fleet
        return min(self._start, max(START_FLOORS * fleet.hang_floor, fleet.hang_factor * max(like)))

    def usual_start(self) -> float:
        """Return the median duration of this run's starts so far, in seconds; before the first, the limit for a start."""
        starts = [seconds for like in self._starts.values() for seconds in like]
        return percentile(starts, 0.5) if starts else self._start

    def of_silence(self, beats: Sequence[Beat]) -> float | None:
        limits = [self._limit(self._key(beat)) for beat in beats if beat.count]
        known = [limit for limit in limits if limit is not None]
        return max(known) if known and len(known) == len(limits) else self._silence

    def _limit(self, key: str) -> float | None:
        times = self._silences.get(key, ())
        if len(times) < (1 if key.startswith("first ") else ENOUGH):
            return None
        return max(self._fleet.hang_floor, self._fleet.hang_factor * percentile(times, 0.99))


def percentile(values: Sequence[float] | deque[float], share: float) -> float:
    """Return the sorted value at index int(share x count), or the last one: about `share` of the values are below it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
