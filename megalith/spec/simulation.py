"""Conditions of a simulated long run, except its cluster; they are the keys of `megalith simulate --set KEY=VALUE`."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.faults import Reliability
from megalith.spec.fleet import FleetSpec


class TierSeconds(Spec):
    """Seconds for each tier of copies. A tier whose value is None takes its time from the recovery profile or the log."""

    memory: NonNegativeFloat | None = None
    buddy: NonNegativeFloat | None = None
    disk: NonNegativeFloat | None = None
    store: NonNegativeFloat | None = None


class LatencySpec(Spec):
    """Durations of the parts of a recovery. Each given duration replaces the value of the recovery profile or the log."""

    crash: NonNegativeFloat | None = Field(default=None, description="seconds from a rank's death until it is detected")
    hang: NonNegativeFloat | None = Field(default=None, description="seconds from the start of a hang until it is detected")
    node_lost: NonNegativeFloat | None = Field(default=None, description="seconds from the loss of a node until it is detected")
    restart: NonNegativeFloat | None = Field(
        default=None, description="seconds from the decision to restart until ranks can restore the state"
    )
    replace: NonNegativeFloat | None = Field(
        default=None, description="additional seconds of a restart in which a spare node joins"
    )
    restore: TierSeconds = Field(default=TierSeconds(), description="seconds to restore from each tier")
    stall: TierSeconds = Field(
        default=TierSeconds(), description="seconds for which training stops while a copy is made in each tier"
    )
    write: NonNegativeFloat | None = Field(
        default=None, description="seconds from the start of a checkpoint until all of it is in the shared store"
    )
    save: NonNegativeFloat | None = Field(default=None, description="seconds that training waits for a save")
    start: NonNegativeFloat | None = Field(default=None, description="seconds that the first start takes")
    check: NonNegativeFloat | None = Field(default=None, description="seconds that a node's health check takes")
    verify: NonNegativeFloat | None = Field(
        default=None, description="share of the run's time that verification by recomputation takes (fleet.verify_every)"
    )


class SimulationSpec(Spec):
    """A long run with faults. A key that is None gets its value from the run file or, without one, the default in its description."""

    days: PositiveFloat = Field(default=30.0, description="length of the run in days")
    checkpoint_every: PositiveFloat | None = Field(
        default=None,
        description="minutes of training between checkpoints in the shared store; default: the run's interval, or 30",
    )
    step_seconds: PositiveFloat | None = Field(
        default=None, description="seconds of one step without faults; default: the planner's prediction for the run, or 10"
    )
    state_bytes: PositiveFloat | None = Field(
        default=None,
        description="bytes of the weights and moments of all ranks together, from which the time of a buddy copy is computed; "
        "default: the bytes for the run's model",
    )
    storage: PositiveFloat | None = Field(
        default=None,
        description="bytes/s of the shared store, from which the times of checkpoints are computed; default: the profile or log "
        "gives these times",
    )
    profile: Literal["cold", "warm", "memory"] = Field(default="warm", description="assumed speed of recovery")
    planned: NonNegativeFloat = Field(default=0.0, description="planned stops a day; Llama 3 405B had 0.87 (47 in 54 days)")
    sites: PositiveInt | None = Field(
        default=None,
        description="number of sites, which train separately and merge their weights at intervals; default: the run's sites.count, or 1",
    )
    merge_every: PositiveFloat | None = Field(
        default=None,
        description="seconds of training between two merges; default: the time of sites.inner_steps / sites.fragments steps, or 300",
    )
    merge_seconds: NonNegativeFloat | None = Field(
        default=None, description="seconds that a merge delays a site; default: the prediction for the run's sites.link, or 0"
    )
    return_seconds: NonNegativeFloat | None = Field(
        default=None,
        description="seconds that a returning site needs to receive the weights from the other sites; default: the time in which "
        "sites.link carries 8 bytes per parameter, or 60",
    )
    grace: PositiveFloat | None = Field(
        default=None,
        description="seconds that a merge waits for a site; default: the run's sites.grace, or the time of sites.inner_steps steps",
    )
    patience: PositiveFloat | None = Field(
        default=None,
        description="seconds that sites wait for a quorum; default: the run's launch.timeout plus fleet.wait_limit, or 4,200",
    )
    decides: NonNegativeInt | None = Field(
        default=None,
        description="number of the site that always decides merges; default: the run's sites.decides, or any present site",
    )
    staleness: NonNegativeInt | None = Field(
        default=None,
        description="number of merges that a slow site may miss before other sites wait for it; default: the run's sites.staleness, or 0",
    )
    interruptions: NonNegativeFloat | None = Field(
        default=None, description="unexpected interruptions per device-hour; default: the value for the cluster"
    )
    fleet: FleetSpec = Field(
        default=FleetSpec(), description="spare nodes, copies of the state and recovery policy, as in [fleet] of a run file"
    )
    reliability: Reliability = Field(
        default=Reliability(),
        description="fault rates and repair times of nodes; a key that is left out has its value for the cluster",
    )
    latencies: LatencySpec = Field(default=LatencySpec(), description="measured durations of the parts of a recovery")
