"""State that remains after a controller's end: the recovery policy's state in the run folder, and the ledger of nodes."""

import json
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megalith import disk, epochs
from megalith.control import node_ledger, policy
from megalith.control.policy import VACANT, State
from megalith.fleet.job import Job
from megalith.spec.fleet import FleetSpec

FILE = "fleet.json"


@dataclass(frozen=True)
class Memory:
    """Reads and writes the state of one run's controllers: the file `ranks/fleet.json`, and the ledger of nodes (`fleet.ledger`,
    by default in the run folder)."""

    job: Job
    fleet: FleetSpec
    epoch: int = 0

    @property
    def _file(self) -> Path:
        return self.job.run_dir.resolve() / "ranks" / epochs.name(FILE, self.epoch)

    @property
    def _ledger(self) -> Path:
        own = self.job.run_dir.resolve() / epochs.name(node_ledger.FILE, self.epoch)
        return Path(self.fleet.ledger) if self.fleet.ledger else own

    @cached_property
    def _place(self) -> disk.Place:
        return disk.Place(self._ledger.parent)

    def recall(self, there: tuple[str, ...]) -> State:
        """Return the state of a killed controller if its nodes are exactly `there`; else return a new state. Raises OSError if
        the ledger's folder cannot be made."""
        disk.make_folder(self._place.folder)
        fresh = self._fresh(there)
        try:
            old = policy.load(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return fresh
        known = {*old.placement, *old.spares, *old.quarantined} - {VACANT}
        if known != set(there) or len(old.placement) != self.fleet.nodes or VACANT in old.placement:
            return fresh
        return replace(old, stopped=False, fruitless=0, waiting=False, leaving=(), least=fresh.least)

    def _fresh(self, there: tuple[str, ...]) -> State:
        fleet, known = self.fleet, node_ledger.standings(node_ledger.read_nodes(self._ledger))
        since = time.time() - fleet.lemon_hours * policy.HOUR
        faults = {node: known[node].faults_since(since) for node in there if node in known}
        lemons = {node: times[-1] for node, times in faults.items() if len(times) >= fleet.lemon_faults}
        out = lemons | {node: at for node in there if node in known and (at := known[node].quarantined) is not None}
        fit = tuple(node for node in there if node not in out)
        placement = (*fit[: fleet.nodes], *[VACANT] * (fleet.nodes - len(fit)))
        least = -(-self.job.fallback.ranks * fleet.nodes // self.job.ranks) if self.job.fallback else 1
        return State(placement=placement, spares=fit[fleet.nodes :], faults=faults, quarantined=out, least=least)

    def note(self, before: State, after: State, *, at: float, reason: str) -> None:
        """Append what a decision has changed to the ledger of nodes; do nothing if the ledger's folder is unavailable."""
        if self._place.away():
            return
        run = str(self.job.run_dir.resolve())
        for record in node_ledger.node_changes(before, after, time=at, reason=reason, run=run):
            node_ledger.note(self._ledger, record)

    def keep(self, state: State) -> None:
        """Write the policy's state for a later controller, without the list of copies, which that controller makes again."""
        with disk.if_available(self._file):
            disk.write_whole(self._file, json.dumps(policy.dump(replace(state, copies=()))))
