"""A run's response to faults: spares, copies of its state, checks, and when it stops for the user."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.plan import Plan


class FleetSpec(Spec):
    """The policy's own numbers (`control.policy`). A feature that is switched off costs nothing."""

    recover: bool = Field(
        default=True,
        description="start the ranks again after a fault; false: any fault ends the run, and nothing is copied or checked",
    )
    nodes: PositiveInt = Field(
        default=1, description="groups of ranks treated as machines; on one machine, more than one is a rehearsal"
    )
    spares: NonNegativeInt = Field(default=0, description="warm nodes outside the mesh that take a lost node's place")
    no_spare: Literal["wait", "shrink", "stop"] = Field(
        default="wait", description="when a node is gone and no spare is left; shrink: continue under `fallback`, not bitwise"
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
    memory_keep: PositiveInt = Field(default=2, description="copies in shared memory; one more while the next is being written")
    buddy: Literal["none", "next", "far"] = Field(
        default="far",
        description="a second copy in another node's memory: the next one's, or half the nodes away (another rack's)",
    )
    disk_every: NonNegativeInt = Field(default=0, description="steps between copies on the node's own disk; 0: none")
    disk: str = Field(
        default="/var/tmp",
        description="folder for these copies on each node's own disk, preferably one that survives a restart of the node",
    )
    digest: bool = Field(default=True, description="digest the state after each update and before the next: finds flips at rest")
    verify_every: NonNegativeInt = Field(
        default=0,
        description="steps between recomputations of another replica's microbatch and of the buddy's update. A persistent fault is "
        "detected within this many steps, a one-off fault only in a verified step; 0: never",
    )
    verify: Literal["one", "all"] = Field(
        default="one",
        description="microbatches recomputed in such a step. one: a single one, apart from the step, which never detects a "
        "one-off error. all: every one, compared with the step itself, which detects one-off errors in verified "
        "steps (in all steps, if verify_every is 1)",
    )
    hang_factor: PositiveFloat = Field(default=3.0, description="a step may take this many times the rolling 99th percentile")
    hang_floor: PositiveFloat = Field(default=1.0, description="seconds without progress that are never called a hang")
    node_timeout: PositiveFloat = Field(default=3.0, description="seconds without a node's heartbeat until it counts as lost")
    straggler_factor: PositiveFloat = Field(default=1.5, ge=1.0, description="a rank this much slower than the median is slow")
    straggler_steps: PositiveInt = Field(default=8, description="consecutive slow steps that make a straggler")
    same_failure: PositiveInt = Field(
        default=3,
        ge=2,
        description="times that the same failure may occur at one step: the second time falls back a tier, this one stops "
        "the run",
    )
    fruitless: PositiveInt = Field(default=10, description="starts in a row without one step done after which the run stops")
    backoff: NonNegativeFloat = Field(
        default=1.0,
        description="seconds before the third start without a step, and before a second health check; doubles each time",
    )
    backoff_limit: NonNegativeFloat = Field(default=300.0, description="seconds between starts, or health checks, at most")
    check: Literal["start", "return"] = Field(
        default="start",
        description="machine checks: before the first start and before an excluded node returns (start), or only the latter (return)",
    )
    burn_in: NonNegativeFloat = Field(
        default=2.0,
        description="seconds of matrix products, compared bit for bit, before an excluded node returns; 0: none",
    )
    lemon_faults: PositiveInt = Field(default=3, description="faults of one node within lemon_hours that take it out for a check")
    lemon_hours: PositiveFloat = Field(default=168.0, description="how long a node's fault counts against it")
    ledger: str | None = Field(
        default=None,
        description="file that keeps what happened to each node, for all runs that name it; default: nodes.jsonl in the run folder",
    )

    @property
    def looks_before_start(self) -> bool:
        """True if a machine is checked before ranks first start on it."""
        return self.recover and self.check == "start"

    @property
    def tiers(self) -> tuple[Literal["memory", "buddy", "disk", "store"], ...]:
        """The tiers this run copies its state to, fastest first; the shared store always."""
        memory = self.memory_every > 0
        kept = {"memory": memory, "buddy": memory and self.buddy != "none", "disk": self.disk_every > 0, "store": True}
        return tuple(tier for tier in ("memory", "buddy", "disk", "store") if kept[tier])

    def buddy_distance(self, nodes: int) -> int:
        """Distance in nodes from a node to the one with the copy of its state; 0 without such a copy, or with a single node."""
        if self.buddy == "none" or nodes < 2:
            return 0
        return 1 if self.buddy == "next" else nodes // 2
