"""Conditions of a simulated long run, except its cluster; they are the keys of `megalith simulate --set KEY=VALUE`."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.faults import Reliability
from megalith.spec.fleet import FleetSpec


class TierSeconds(Spec):
    """Seconds for each tier of copies. A tier that is None keeps the time of the profile or log."""

    memory: NonNegativeFloat | None = None
    buddy: NonNegativeFloat | None = None
    disk: NonNegativeFloat | None = None
    store: NonNegativeFloat | None = None


class LatencySpec(Spec):
    """Durations of the parts of a recovery, which replace those of the recovery profile or the log."""

    crash: NonNegativeFloat | None = Field(default=None, description="seconds from a rank's death until it is detected")
    hang: NonNegativeFloat | None = Field(default=None, description="seconds from the start of a hang until it is detected")
    node_lost: NonNegativeFloat | None = Field(default=None, description="seconds from the loss of a node until it is detected")
    restart: NonNegativeFloat | None = Field(
        default=None, description="seconds from the decision to restart until ranks can restore the state"
    )
    replace: NonNegativeFloat | None = Field(
        default=None, description="seconds that a restart takes longer if a spare node joins"
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
    """A long run with faults. If a key is None, the run file gives its value; without a run file, the key's description does."""

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
        description="bytes of weights and moments over all ranks, which determine the time of buddy copies; default: those of "
        "the run's model",
    )
    storage: PositiveFloat | None = Field(
        default=None,
        description="bytes/s of the shared store, which determine the time of checkpoints; default: those of the profile or log",
    )
    profile: Literal["cold", "warm", "memory"] = Field(default="warm", description="assumed speed of recovery")
    planned: NonNegativeFloat = Field(default=0.0, description="planned stops a day; Llama 3 405B had 0.87 (47 in 54 days)")
    sites: PositiveInt | None = Field(
        default=None,
        description="number of sites, which train separately and merge their weights at intervals; default: the run's sites.count, or 1",
    )
    merge_every: PositiveFloat | None = Field(
        default=None,
        description="seconds of training between two merges; default: the time of the run's inner_steps / fragments steps, or 300",
    )
    merge_seconds: NonNegativeFloat | None = Field(
        default=None, description="seconds that a merge delays a site; default: the prediction for the run's sites.link, or 0"
    )
    return_seconds: NonNegativeFloat | None = Field(
        default=None,
        description="seconds until a returning site has received the other sites' weights; default: the time of 8 bytes per "
        "parameter over the run's link, or 60",
    )
    grace: PositiveFloat | None = Field(
        default=None,
        description="seconds that a merge waits for a site; default: the run's sites.grace, or the time of its inner_steps",
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
        default=None, description="unexpected interruptions per device-hour; default: the cluster's"
    )
    fleet: FleetSpec = Field(
        default=FleetSpec(), description="spare nodes, copies of the state and recovery policy, as in [fleet] of a run file"
    )
    reliability: Reliability = Field(
        default=Reliability(),
        description="fault rates and repair times of nodes; a key that is not given has the cluster's value",
    )
    latencies: LatencySpec = Field(default=LatencySpec(), description="measured durations of the parts of a recovery")
