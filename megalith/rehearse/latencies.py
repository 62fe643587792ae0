"""Durations of the parts of a recovery: they are assumed, derived from a cluster's figures, or measured in a run with faults."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from megalith.events import Checkpoint, Event, Incident, Recovery, of_kind
from megalith.fleet.observations import Hang, NodesLost, Preempted, RankFailed
from megalith.fleet.tiers import Source, Tier
from megalith.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class Latencies:
    """Durations in seconds, except `verify`: the fraction of the run's time that recomputation for verification takes.

    `crash`, `hang`, `node_lost`: the time from a fault of this kind to the decision. `restart`: the time from the decision until ranks
    can restore the state; `restore`, by tier: the time to restore the state from this tier. `replace`: the additional time if a
    spare joins. `stall`, by tier: how long a copy stops training; `write`: the time until a checkpoint in the store is complete;
    `save`: a save that training waits for; `start`: the first start; `check`: a health check.
    """

    restart: float
    restore: Mapping[str, float]
    stall: Mapping[str, float]
    crash: float = 1.0
    hang: float = 60.0
    node_lost: float = 3.0
    replace: float = 0.0
    write: float = 0.0
    save: float = 30.0
    start: float = 0.0
    check: float = 600.0
    verify: float = 0.0
    source: str = field(default="", compare=False)

    def restored(self, source: Source) -> float:
        """Return the seconds to restore from a source: the restore time of the slowest tier that holds a part of it."""
        if source.tier is None:
            return 0.0
        return max(self.restore[tier.value] for tier in {source.tier, *(tier for _, tier in source.elsewhere)})


def _tiers(memory: float, disk: float, store: float, *, buddy: float | None = None) -> dict[str, float]:
    return {"memory": memory, "buddy": memory if buddy is None else buddy, "disk": disk, "store": store}


PROFILES: dict[str, Latencies] = {
    "cold": Latencies(
        restart=600.0, restore=_tiers(5, 30, 120, buddy=10), stall=_tiers(0.2, 2, 30), hang=600.0, replace=120.0, start=900.0,
        source="assumed: processes restarted by a scheduler, blocking saves, collectives that time out after ten minutes",
    ),
    "warm": Latencies(
        restart=180.0, restore=_tiers(5, 30, 60, buddy=10), stall=_tiers(0.2, 1, 2), hang=60.0, replace=30.0, start=600.0, write=60.0,
        source="assumed: warm spares, asynchronous saves, hangs detected within a minute",
    ),
    "memory": Latencies(
        restart=60.0, restore=_tiers(5, 20, 60, buddy=10), stall=_tiers(0.05, 1, 2), hang=30.0, replace=15.0, start=600.0, write=60.0,
        source="assumed: processes kept ready for a restart, state copied to memory in every step",
    ),
}  # fmt: skip
"""Profiles by name. All durations are assumed, not measured; `calibrated` replaces those for which a run's log has values."""


def of_cluster(
    cluster: ClusterSpec, profile: str = "warm", *, state_bytes: float | None = None, storage: float | None = None
) -> Latencies:
    """Return a profile in which durations that depend on the size of the state are computed from the hardware's rates. `state_bytes`: the
    size of the whole state; `storage`: bytes/s of the shared store.

    A blocking save stops training for state / storage seconds; an asynchronous save is complete after the same time. Raises
    ValueError for an unknown profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"{profile!r} is not a profile of latencies. Use one of {', '.join(PROFILES)}")
    return at_rates(PROFILES[profile], cluster, state_bytes=state_bytes, storage=storage)


def at_rates(
    chosen: Latencies, cluster: ClusterSpec, *, state_bytes: float | None = None, storage: float | None = None
) -> Latencies:
    """Return `chosen` with new values for durations that grow with the state: the state's bytes divided by the hardware's rates."""
    if not state_bytes:
        return chosen
    restore, notes = dict(chosen.restore), [chosen.source, f"a state of {state_bytes / 1e12:.3g} TB"]
    if cluster.scale_out:
        restore["buddy"] = state_bytes / cluster.count / cluster.scale_out
        notes.append(f"buddy copies at {cluster.scale_out / 1e9:.3g} GB/s a device")
    if storage:
        transfer = state_bytes / storage
        notes.append(f"a store of {storage / 1e12:.3g} TB/s")
        restore["store"] = transfer
        blocking = chosen.write == 0
        stall = {**chosen.stall, "store": transfer} if blocking else chosen.stall
        chosen = replace(chosen, stall=stall, write=0.0 if blocking else transfer, save=transfer)
    return replace(chosen, restore=restore, source="; ".join(notes))


_DEPTH = tuple(tier.value for tier in Tier)  # fastest first
_SEEN_AS = {RankFailed.kind: "crash", Hang.kind: "hang", NodesLost.kind: "node_lost"}


def calibrated(events: Iterable[Event], base: Latencies, *, typical: Callable[[Sequence[float]], float] = median) -> Latencies:
    """Return `base` with the typical durations of a run's incidents and saves (events `Incident`, `Recovery`, `Checkpoint`).
    `typical`: the function that combines several durations into one: the median, or the mean if totals must be correct.

    For each recovery the log has only the sum of restart and restore. `restart` is set to restart + restore of the fastest tier, and the
    restore of a slower tier to its restart + restore minus those of the fastest tier; a tier without a restore in the log keeps the value
    of `base`.
    """
    whole = list(events)
    begun = {incident.incident: incident for incident in of_kind(whole, Incident)}
    detection: dict[str, list[float]] = {}
    for one in begun.values():
        detection.setdefault(_SEEN_AS.get(one.cause, ""), []).append(max(0.0, one.time - one.began))
    found: dict[str, Any] = {name: typical(times) for name, times in detection.items() if name}
    took = {tier: typical(times) for tier, times in _recoveries(whole, begun).items()}
    if took:
        found["restart"] = min(took.values())
        found["restore"] = {
            tier: took[tier] - found["restart"] if tier in took else seconds for tier, seconds in base.restore.items()
        }
        found["replace"] = 0.0
    saves = of_kind(whole, Checkpoint)
    if saves:
        found["stall"] = {**base.stall, "store": typical([save.wait_seconds for save in saves])}
        found["write"] = found["save"] = typical([save.seconds for save in saves])
    return replace(
        base, **found, source=f"{typical.__name__.removeprefix('f')}s of {len(begun)} incidents and {len(saves)} saves"
    )


def _recoveries(events: Sequence[Event], begun: Mapping[int, Incident]) -> dict[str, list[float]]:
    """Return the durations of recoveries in seconds, by the slowest tier that each recovery read. A duration runs from the decision to
    restart to the next step, including waits for a save. A recovery is left out if another incident was decided before it ended."""
    decided = sorted(incident.time for incident in begun.values())
    found: dict[str, list[float]] = {}
    for recovery in of_kind(events, Recovery):
        incident = begun.get(recovery.incident)
        if not recovery.restored or incident is None or incident.cause == Preempted.kind:
            continue
        tiers = [tier for tier in _DEPTH if f" {tier}" in recovery.restored]
        if tiers and bisect_right(decided, recovery.time) == bisect_right(decided, incident.time):
            found.setdefault(tiers[-1], []).append(max(0.0, recovery.time - incident.time))
    return found
