"""Detection of ranks that compute too slowly. Only the time that a rank itself works is compared, because all ranks' steps last
as long as the slowest rank's."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from megalith.fleet.heartbeat import Beat
from megalith.fleet.observations import Straggler
from megalith.fleet.rank_info import slot_of
from megalith.spec.fleet import FleetSpec

KEPT = 64  # steps that a rank's usual share of the median is learnt from
ENOUGH = 8  # steps after which speeds are known; before, all ranks are taken to be equally fast
NOISE_SECONDS = 0.05  # what a step may take longer without anybody being slow


class Stragglers:
    """Compares the working times in the ranks' heartbeats. A rank's time is compared with the rank's usual multiple of the
    median, because pipeline stages differ."""

    def __init__(self, fleet: FleetSpec) -> None:
        self._fleet = fleet
        self._usual: dict[int, deque[float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a generation of ranks: forget which ranks were slow, but keep each rank's usual multiple of the median."""
        self._counted = -1  # the last step that was: its beats are there until the next, and are looked at again
        self._told: dict[int, dict[int, float]] = {}  # step -> rank -> seconds
        self._slow: dict[int, tuple[int, float, float]] = {}  # rank -> steps in a row, seconds lost, since when
        self._named: set[tuple[int, bool]] = set()

    def note(self, beats: Sequence[Beat], *, nodes: Sequence[str], replacing: float) -> Straggler | None:
        """Return an observation when a slow rank is detected, and again when it has cost `replacing` seconds; else None."""
        for rank, beat in enumerate(beats):
            if beat.compute > 0 and beat.step > self._counted:
                self._told.setdefault(beat.step, {})[rank] = beat.compute
        whole = [step for step, told in self._told.items() if len(told) == len(beats)]
        for step in sorted(whole):
            self._step(self._told[step], beats)
        if whole:
            self._counted = max(whole)
            self._told = {step: told for step, told in self._told.items() if step > self._counted}
        return self._name(beats, nodes, replacing)

    def _step(self, seconds: dict[int, float], beats: Sequence[Beat]) -> None:
        usual = median(seconds.values())
        for rank, own in seconds.items():
            history = self._usual.setdefault(rank, deque(maxlen=KEPT))
            expected = usual * (median(history) if len(history) >= ENOUGH else 1.0)
            if own > self._fleet.straggler_factor * expected and own - expected > NOISE_SECONDS:
                steps, lost, since = self._slow.get(rank, (0, 0.0, beats[rank].time - own))
                self._slow[rank] = (steps + 1, lost + own - expected, since)
            else:
                self._slow.pop(rank, None)
                history.append(own / usual if usual else 1.0)

    def _name(self, beats: Sequence[Beat], nodes: Sequence[str], replacing: float) -> Straggler | None:
        for rank, (steps, lost, _) in self._slow.items():
            key = rank, lost >= replacing
            if steps < self._fleet.straggler_steps or key in self._named:
                continue
            self._named.add(key)
            slot = slot_of(rank, world=len(beats), slots=len(nodes))
            last = self._ratio(rank, beats)
            return Straggler(
                time=max(beat.time for beat in beats), step=beats[rank].step, slot=slot, node=nodes[slot], rank=rank,
                ratio=last, lost=lost, replacing=replacing,
            )  # fmt: skip
        return None

    def _ratio(self, rank: int, beats: Sequence[Beat]) -> float:
        others = median(beat.compute for beat in beats) or beats[rank].compute
        return beats[rank].compute / others if others else 1.0
