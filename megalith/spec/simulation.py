"""Conditions of a simulated long run, apart from its cluster: the keys of `megalith simulate --set KEY=VALUE`."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.faults import Reliability
from megalith.spec.fleet import FleetSpec


class TierSeconds(Spec):
    """Seconds for each tier of copies; a tier that is None keeps its value."""

    memory: NonNegativeFloat | None = None
    buddy: NonNegativeFloat | None = None
    disk: NonNegativeFloat | None = None
    store: NonNegativeFloat | None = None


class LatencySpec(Spec):
    """Parts of a recovery, in seconds, that override those of the profile or the log."""

    crash: NonNegativeFloat | None = Field(default=None, description="from a rank's death until it is detected")
    hang: NonNegativeFloat | None = Field(default=None, description="from a hang until it is detected")
    node_lost: NonNegativeFloat | None = Field(default=None, description="from the loss of a node until it is detected")
    restart: NonNegativeFloat | None = Field(default=None, description="from the decision until ranks can restore")
    replace: NonNegativeFloat | None = Field(default=None, description="additional time when a spare joins")
    restore: TierSeconds = Field(default=TierSeconds(), description="seconds to restore from each tier")
    stall: TierSeconds = Field(default=TierSeconds(), description="seconds that work stops for each copy")
    write: NonNegativeFloat | None = Field(
        default=None, description="from the start of a checkpoint until it is whole in the store"
    )
    save: NonNegativeFloat | None = Field(default=None, description="seconds that training waits for a save")
    start: NonNegativeFloat | None = Field(default=None, description="the first start")
    check: NonNegativeFloat | None = Field(default=None, description="a node's health check")
    verify: NonNegativeFloat | None = Field(
        default=None, description="share of the run's time that recomputation takes (fleet.verify_every)"
    )


class SimulationSpec(Spec):
    """A long run with faults. A key that is None has the value of the run file; without one, the value in the key's
    description."""

    days: PositiveFloat = Field(default=30.0, description="length of the run in days")
    checkpoint_every: PositiveFloat | None = Field(
        default=None, description="minutes of work between checkpoints in the shared store; default: the run's, or 30"
    )
    step_seconds: PositiveFloat | None = Field(
        default=None, description="seconds of one step without faults; default: the planner's prediction for the run, or 10"
    )
    state_bytes: PositiveFloat | None = Field(
        default=None,
        description="bytes of weights and moments over all ranks, for the time of buddy copies; default: those of the run's model",
    )
    storage: PositiveFloat | None = Field(
        default=None, description="bytes/s of the shared store, for the time of checkpoints; default: the profile's, or the log's"
    )
    profile: Literal["cold", "warm", "memory"] = Field(default="warm", description="assumed speed of recovery")
    planned: NonNegativeFloat = Field(default=0.0, description="planned stops a day; Llama 3 405B had 0.87 (47 in 54 days)")
    sites: PositiveInt | None = Field(
        default=None,
        description="number of sites: groups of nodes that train apart and merge their weights; default: the run's sites.count, or 1",
    )
    merge_every: PositiveFloat | None = Field(
        default=None, description="seconds of work between two merges; default: the run's inner_steps / fragments steps, or 300"
    )
    merge_seconds: NonNegativeFloat | None = Field(
        default=None, description="seconds that a merge delays a site; default: the prediction for the run's sites.link, or 0"
    )
    return_seconds: NonNegativeFloat | None = Field(
        default=None,
        description="seconds until a returning site has the weights of the others; default: 8 bytes a parameter over the run's link, or 60",
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
        description="number of the site that always decides; default: the run's sites.decides, or one of the present sites",
    )
    staleness: NonNegativeInt | None = Field(
        default=None,
        description="number of merges that a slower site may miss before a merge waits for it; default: the run's sites.staleness, or 0",
    )
    interruptions: NonNegativeFloat | None = Field(
        default=None, description="unexpected interruptions a device-hour; default: the cluster's"
    )
    fleet: FleetSpec = Field(default=FleetSpec(), description="spares, copies of the state, policy")
    reliability: Reliability = Field(
        default=Reliability(), description="how nodes break; a key that is not given has the cluster's value"
    )
    latencies: LatencySpec = Field(default=LatencySpec(), description="known durations of parts of a recovery")
