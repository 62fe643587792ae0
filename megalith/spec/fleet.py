"""A run's response to faults: spares, copies of its state, checks, and the limits after which it stops."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.plan import Plan


class FleetSpec(Spec):
    """Settings of the recovery policy (`control.policy`). A feature that is switched off costs nothing."""

    recover: bool = Field(
        default=True,
        description="start the ranks again after a fault; false: any fault ends the run, and nothing is copied or checked",
    )
    nodes: PositiveInt = Field(
        default=1, description="number of nodes, each a group of ranks; on one machine, more than one rehearses a cluster"
    )
    spares: NonNegativeInt = Field(default=0, description="warm nodes outside the mesh that take a lost node's place")
    no_spare: Literal["wait", "shrink", "stop"] = Field(
        default="wait",
        description="action when a node is lost and no spare is left; shrink: continue under `fallback`, not bitwise",
    )
    wait_limit: PositiveFloat = Field(
        default=3600.0,
        description="seconds to wait for a node, for space for the run's last checkpoint, or for a checkpoint that cannot be "
        "reached. If no node comes, the run shrinks if it has a fallback, else it stops (exit status 71)",
    )
    fallback: Plan | None = Field(default=None, description="plan to continue with when too few nodes are left")
    memory_every: NonNegativeInt = Field(
        default=1, description="steps between copies of the state into the node's shared memory; 0: none"
    )
    memory_keep: PositiveInt = Field(default=2, description="copies kept in shared memory, besides the one being written")
    buddy: Literal["none", "next", "far"] = Field(
        default="far",
        description="a second copy in the memory of another node. next: the next node. far: half the nodes away, in another rack",
    )
    disk_every: NonNegativeInt = Field(default=0, description="steps between copies on the node's own disk; 0: none")
    disk: str = Field(
        default="/var/tmp",
        description="folder of the copies on each node's own disk, preferably one that survives a restart of the node",
    )
    digest: bool = Field(
        default=True, description="digest the state after each update and before the next, to find bits that flipped in between"
    )
    verify_every: NonNegativeInt = Field(
        default=0,
        description="steps between recomputations of another replica's microbatch and of the buddy's update. A persistent fault is "
        "detected within this many steps, a one-off fault only in a verified step; 0: never",
    )
    verify: Literal["one", "all"] = Field(
        default="one",
        description="microbatches recomputed in a verified step. one: a single one, computed again apart from the "
        "step; never detects a one-off error. all: every one, compared with the step's own; detects one-off errors in "
        "verified steps (in all steps, if verify_every is 1)",
    )
    hang_factor: PositiveFloat = Field(
        default=3.0, description="a step that takes more than this many times the rolling 99th percentile is a hang"
    )
    hang_floor: PositiveFloat = Field(default=1.0, description="seconds without progress up to which a run is never called hung")
    node_timeout: PositiveFloat = Field(default=3.0, description="seconds without a node's heartbeat until it counts as lost")
    straggler_factor: PositiveFloat = Field(default=1.5, ge=1.0, description="a rank this much slower than the median is slow")
    straggler_steps: PositiveInt = Field(default=8, description="consecutive slow steps that make a straggler")
    same_failure: PositiveInt = Field(
        default=3,
        ge=2,
        description="number of times that one failure occurs at one step before the run stops; the second time restores from the next tier",
    )
    fruitless: PositiveInt = Field(
        default=10, description="number of starts in a row without a finished step after which the run stops"
    )
    backoff: NonNegativeFloat = Field(
        default=1.0,
        description="seconds before the third start without a step, and before a second health check; doubles each time",
    )
    backoff_limit: NonNegativeFloat = Field(default=300.0, description="seconds between starts, or health checks, at most")
    check: Literal["start", "return"] = Field(
        default="start",
        description="when machines are checked. start: before the first start and before an excluded node returns. "
        "return: only before a return",
    )
    burn_in: NonNegativeFloat = Field(
        default=2.0,
        description="seconds of matrix products, compared bit for bit, before an excluded node returns; 0: none",
    )
    lemon_faults: PositiveInt = Field(
        default=3, description="number of faults of one node within lemon_hours after which it is excluded and checked"
    )
    lemon_hours: PositiveFloat = Field(default=168.0, description="hours for which a fault counts against its node")
    ledger: str | None = Field(
        default=None,
        description="file with the history of each node, shared by all runs that name it; default: nodes.jsonl in the run folder",
    )

    @property
    def looks_before_start(self) -> bool:
        """True if a machine is checked before ranks first start on it."""
        return self.recover and self.check == "start"

    @property
    def tiers(self) -> tuple[Literal["memory", "buddy", "disk", "store"], ...]:
        """The tiers that this run copies its state to, fastest first. The shared store is always one."""
        memory = self.memory_every > 0
        kept = {"memory": memory, "buddy": memory and self.buddy != "none", "disk": self.disk_every > 0, "store": True}
        return tuple(tier for tier in ("memory", "buddy", "disk", "store") if kept[tier])

    def buddy_distance(self, nodes: int) -> int:
        """Distance in nodes from a node to the node that keeps a copy of its state; 0 without such a copy, or with a single
        node."""
        if self.buddy == "none" or nodes < 2:
            return 0
        return 1 if self.buddy == "next" else nodes // 2
