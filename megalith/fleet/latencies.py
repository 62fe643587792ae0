"""How long the parts of a recovery take: assumed profiles, what a cluster's figures allow, or measured in a run with faults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from megalith.fleet.tiers import Source
from megalith.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class Latencies:
    """All in seconds, but `verify`: the share of time that recomputation takes.

    `crash`, `hang`, `node_lost`: from a fault to the decision. `restart`: from the decision to ranks that can restore; `restore` by
    tier, what comes after. `replace`: more when a spare joins. `stall` by tier: how long a copy stops the work; `write`: until a
    checkpoint in the store is whole; `save`: a save that is waited for. `start`: the first start. `check`: a health check.
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
        """Seconds to restore from a source: its slowest tier."""
        if source.tier is None:
            return 0.0
        return max(self.restore[tier.value] for tier in {source.tier, *(tier for _, tier in source.elsewhere)})


def _tiers(memory: float, disk: float, store: float, *, buddy: float | None = None) -> dict[str, float]:
    return {"memory": memory, "buddy": memory if buddy is None else buddy, "disk": disk, "store": store}


PROFILES: dict[str, Latencies] = {
    "cold": Latencies(
        restart=600.0, restore=_tiers(5, 30, 120, buddy=10), stall=_tiers(0.2, 2, 30), hang=600.0, replace=120.0, start=900.0,
        source="assumed: processes started anew by a scheduler, blocking saves, collectives that time out after ten minutes",
    ),
    "warm": Latencies(
        restart=180.0, restore=_tiers(5, 30, 60, buddy=10), stall=_tiers(0.2, 1, 2), hang=60.0, replace=30.0, start=600.0, write=60.0,
        source="assumed: warm spares, asynchronous saves, hangs seen within a minute",
    ),
    "memory": Latencies(
        restart=60.0, restore=_tiers(5, 20, 60, buddy=10), stall=_tiers(0.05, 1, 2), hang=30.0, replace=15.0, start=600.0, write=60.0,
        source="assumed: processes kept ready, state in memory every step",
    ),
}  # fmt: skip
"""Named assumptions to begin with; none is a measurement. `calibrated` replaces what a run's log knows."""


def of_cluster(
    cluster: ClusterSpec, profile: str = "warm", *, state_bytes: float | None = None, storage: float | None = None
) -> Latencies:
    """A profile with what the hardware's rates say. `state_bytes`: of the whole state; `storage`: bytes/s of the shared store.

    A blocking save takes state / storage, an asynchronous one that long to be whole. Raises ValueError for an unknown profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"{profile!r} is no profile of latencies. Use one of {', '.join(PROFILES)}")
    chosen = PROFILES[profile]
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


_SEEN_AS = {"rank_failed": "crash", "hang": "hang", "nodes_lost": "node_lost"}


def calibrated(records: Iterable[Mapping[str, Any]], base: Latencies) -> Latencies:
    """`base` with the medians that a run's incidents and saves show (events `incident`, `recovery`, `checkpoint`).

    The log knows recovery as a whole, so restart and restore are not told apart: restart takes the fastest tier's median, and a
    slower tier what its own median is above that.
    """
    whole = list(records)
    begun = {record["incident"]: record for record in whole if record["type"] == "incident"}
    detection: dict[str, list[float]] = {}
    for record in begun.values():
        detection.setdefault(_SEEN_AS.get(record["cause"], ""), []).append(max(0.0, record["time"] - record["began"]))
    recovery: dict[str, list[float]] = {}
    for record in whole:
        if record["type"] == "recovery" and record["restored"] and record["incident"] in begun:
            tier = next((tier for tier in base.restore if f" in {tier}" in record["restored"]), None)
            if tier:
                recovery.setdefault(tier, []).append(max(0.0, record["time"] - begun[record["incident"]]["time"]))
    found: dict[str, Any] = {name: median(times) for name, times in detection.items() if name}
    medians = {tier: median(times) for tier, times in recovery.items()}
    if medians:
        found["restart"] = min(medians.values())
        found["restore"] = {tier: medians.get(tier, found["restart"]) - found["restart"] for tier in base.restore}
        found["replace"] = 0.0
    waits = [record["wait_seconds"] for record in whole if record["type"] == "checkpoint"]
    writes = [record["seconds"] for record in whole if record["type"] == "checkpoint"]
    if waits:
        found["stall"] = {**base.stall, "store": median(waits)}
        found["write"] = found["save"] = median(writes)
    return replace(base, **found, source=f"medians of {len(begun)} incidents and {len(waits)} saves")
