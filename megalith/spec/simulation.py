"""Conditions of a simulated long run, besides its cluster: every key of `megalith simulate --set KEY=VALUE`."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.faults import Reliability
from megalith.spec.fleet import FleetSpec


class TierSeconds(Spec):
    """Seconds by tier of copies; tiers not given keep their values."""

    memory: NonNegativeFloat | None = None
    buddy: NonNegativeFloat | None = None
    disk: NonNegativeFloat | None = None
    store: NonNegativeFloat | None = None


class LatencySpec(Spec):
    """Parts of a recovery, in seconds, that override those of the profile or the log."""

    crash: NonNegativeFloat | None = Field(default=None, description="until a dead rank is seen")
    hang: NonNegativeFloat | None = Field(default=None, description="until a hang is seen")
    node_lost: NonNegativeFloat | None = Field(default=None, description="until the loss of a node is seen")
    restart: NonNegativeFloat | None = Field(default=None, description="from the decision until ranks can restore")
    replace: NonNegativeFloat | None = Field(default=None, description="added when a spare joins")
    restore: TierSeconds = Field(default=TierSeconds(), description="seconds to restore from each tier")
    stall: TierSeconds = Field(default=TierSeconds(), description="seconds that work stops for each copy")
    write: NonNegativeFloat | None = Field(default=None, description="until a checkpoint in the store is whole")
    save: NonNegativeFloat | None = Field(default=None, description="a save for which training waits")
    start: NonNegativeFloat | None = Field(default=None, description="the first start")
    check: NonNegativeFloat | None = Field(default=None, description="a node's health check")
    verify: NonNegativeFloat | None = Field(
        default=None, description="share of the run's time that recomputation takes (fleet.verify_every)"
    )


class SimulationSpec(Spec):
    """A long run with faults. None: the value of the run file, or else the one in the key's description."""

    days: PositiveFloat = Field(default=30.0, description="how long the run takes")
    checkpoint_every: PositiveFloat | None = Field(
        default=None, description="minutes of work between checkpoints in the shared store; else the run's, or 30"
    )
    step_seconds: PositiveFloat | None = Field(
        default=None, description="seconds of one step without faults; else the planner's prediction of the run, or 10"
    )
    state_bytes: PositiveFloat | None = Field(
        default=None,
        description="bytes of weights and moments over all ranks, for the time of buddy copies; default: those of the run's model",
    )
    storage: PositiveFloat | None = Field(
        default=None, description="bytes/s of the shared store, for the time of checkpoints; default: the profile's, or the log's"
    )
    profile: Literal["cold", "warm", "memory"] = Field(default="warm", description="how fast recovery is assumed to be")
    planned: NonNegativeFloat = Field(default=0.0, description="planned stops a day; Llama 3 405B had 47 in 54 days: 0.87")
    sites: PositiveInt | None = Field(
        default=None, description="groups of nodes that train apart and merge their weights; else the run's sites.count, or 1"
    )
    merge_every: PositiveFloat | None = Field(
        default=None, description="seconds of work between two merges; else the run's inner_steps / fragments steps, or 300"
    )
    merge_seconds: NonNegativeFloat | None = Field(
        default=None, description="seconds for which a merge holds a site up; else as predicted for the run's sites.link, or 0"
    )
    return_seconds: NonNegativeFloat | None = Field(
        default=None,
        description="seconds until a site that was away has the weights of the others; else 8 bytes a parameter over the run's link, or 60",
    )
    grace: PositiveFloat | None = Field(
        default=None, description="seconds that a merge waits for a site; else the run's, or as long as all its inner_steps take"
    )
    patience: PositiveFloat | None = Field(
        default=None,
        description="seconds that sites wait for a quorum; else the run's launch.timeout and fleet.wait_limit, or 4,200",
    )
    decides: NonNegativeInt | None = Field(
        default=None, description="number of the site that always decides; else the run's, or one of the present sites"
    )
    staleness: NonNegativeInt | None = Field(
        default=None,
        description="merges that a site which computes longer may miss before one waits for it; else the run's, or 0",
    )
    interruptions: NonNegativeFloat | None = Field(
        default=None, description="unexpected interruptions a device-hour; else as the cluster says"
    )
    fleet: FleetSpec = Field(default=FleetSpec(), description="spares, copies of the state, policy")
    reliability: Reliability = Field(default=Reliability(), description="how nodes break; keys not given are the cluster's")
    latencies: LatencySpec = Field(default=LatencySpec(), description="parts of a recovery that are known")
