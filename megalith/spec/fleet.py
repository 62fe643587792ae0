"""A run's response to faults: spares, copies of its state, checks, and the limits after which it stops."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.plan import Plan


class FleetSpec(Spec):
    """Settings of the recovery policy (`control.policy`). A feature that is switched off costs nothing."""

    recover: bool = Field(
        default=True,
        description="restart the ranks after a fault; false: any fault ends the run, no copies of the state are kept in "
        "memory or on disk, and machines are not checked",
    )
    nodes: PositiveInt = Field(
        default=1, description="number of nodes, each a group of ranks; more than one node on one machine rehearses a cluster"
    )
    spares: NonNegativeInt = Field(default=0, description="number of warm spare nodes outside the mesh, which replace lost nodes")
    no_spare: Literal["wait", "shrink", "stop"] = Field(
        default="wait",
        description="action when a node is lost and no spare is left; shrink: continue under the plan `fallback`, whose "
        "results are not bitwise equal to those of the run's plan",
    )
    wait_limit: PositiveFloat = Field(
        default=3600.0,
        description="seconds to wait for a node, for space for the run's last checkpoint, or for unavailable storage. If no "
        "node joins in this time, the run continues under its fallback if it has one, else it stops (exit status 71)",
    )
    fallback: Plan | None = Field(
        default=None, description="plan under which the run continues when too few nodes are left for its own plan"
    )
    memory_every: NonNegativeInt = Field(
        default=1, description="steps between copies of the state into the node's shared memory; 0: none"
    )
    memory_keep: PositiveInt = Field(
        default=2, description="number of complete copies kept in shared memory, in addition to the one being written"
    )
    buddy: Literal["none", "next", "far"] = Field(
        default="far",
        description="node whose memory holds a second copy of a node's state. next: the next node; far: the node half the "
        "nodes away, in another rack",
    )
    disk_every: NonNegativeInt = Field(default=0, description="steps between copies on the node's own disk; 0: none")
    disk: str = Field(
        default="/var/tmp",
        description="folder for copies of the state on each node's own disk, preferably one that survives a restart of the node",
    )
    digest: bool = Field(
        default=True,
        description="compute a digest of the state after each update and before the next one, to detect bits that flipped between the two",
    )
    verify_every: NonNegativeInt = Field(
        default=0,
        description="steps between verified steps. In a verified step, each rank recomputes gradients of another replica, and "
        "the update of the rank whose copy it keeps. A persistent fault is detected within this many steps, a one-off fault only in "
        "a verified step; 0: no step is verified",
    )
    verify: Literal["one", "all"] = Field(
        default="one",
        description="microbatches that are recomputed in a verified step. one: one microbatch is computed twice after the "
        "step, which never detects a one-off error of the step; all: every microbatch of the step is recomputed "
        "and compared, which detects one-off errors in verified steps (in all steps, if verify_every is 1)",
    )
    hang_factor: PositiveFloat = Field(
        default=3.0,
        description="a run hangs if its ranks are silent for more than this many times the 99th percentile of earlier "
        "silences in the same phase",
    )
    hang_floor: PositiveFloat = Field(default=1.0, description="lower limit, in seconds, of the silence that is called a hang")
    node_timeout: PositiveFloat = Field(default=3.0, description="seconds without a heartbeat after which a node counts as lost")
    straggler_factor: PositiveFloat = Field(
        default=1.5,
        ge=1.0,
        description="a rank is slow in a step if it computes this many times as long as usual, relative to the median rank",
    )
    straggler_steps: PositiveInt = Field(
        default=8, description="number of consecutive slow steps after which a rank is called a straggler"
    )
    same_failure: PositiveInt = Field(
        default=3,
        ge=2,
        description="the run stops when the same failure has occurred at the same step this number of times; after the second "
        "time, the run restores from the next slower tier",
    )
    fruitless: PositiveInt = Field(
        default=10, description="the run stops after this number of consecutive starts in which no step was finished"
    )
    backoff: NonNegativeFloat = Field(
        default=1.0,
        description="seconds to wait after two consecutive starts without a finished step, or after a failed health check; "
        "each further such start or check doubles the wait",
    )
    backoff_limit: NonNegativeFloat = Field(
        default=300.0, description="upper limit, in seconds, of the wait between starts or health checks"
    )
    check: Literal["start", "return"] = Field(
        default="start",
        description="when a machine's health is checked. start: before the first start of ranks, and before an excluded node "
        "returns; return: only before an excluded node returns",
    )
    burn_in: NonNegativeFloat = Field(
        default=2.0,
        description="seconds for which an excluded node must repeat matrix products with bitwise equal results before it "
        "returns; 0: no such test",
    )
    lemon_faults: PositiveInt = Field(
        default=3,
        description="a node with this number of faults within lemon_hours is excluded, if a spare can replace it, until it "
        "passes a health check",
    )
    lemon_hours: PositiveFloat = Field(default=168.0, description="hours for which a fault counts towards lemon_faults")
    ledger: str | None = Field(
        default=None,
        description="file with the faults and health checks of each node, which several runs may share; default: nodes.jsonl "
        "in the run folder",
    )

    @property
    def looks_before_start(self) -> bool:
        """True if a machine's health is checked before ranks first start on it."""
        return self.recover and self.check == "start"

    @property
    def tiers(self) -> tuple[Literal["memory", "buddy", "disk", "store"], ...]:
        """The tiers to which this run copies its state, fastest first. The tiers always include the shared store."""
        memory = self.memory_every > 0
        kept = {"memory": memory, "buddy": memory and self.buddy != "none", "disk": self.disk_every > 0, "store": True}
        return tuple(tier for tier in ("memory", "buddy", "disk", "store") if kept[tier])

    def buddy_distance(self, nodes: int) -> int:
        """Distance, in nodes, from a node to the buddy node that keeps a copy of its state (1: the next node); 0 if there is no buddy."""
        if self.buddy == "none" or nodes < 2:
            return 0
        return 1 if self.buddy == "next" else nodes // 2
