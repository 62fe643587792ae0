"""The table `[sites]` of a run file, and the run of one of its sites. No torch."""

from collections.abc import Collection, Sequence
from math import gcd, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megalith.spec.base import Spec
from megalith.spec.plan import Plan

if TYPE_CHECKING:
    from megalith.spec.run import RunSpec

FULL = 32
"""Bits of an element that is sent unchanged."""
CHUNK = 4096
"""Number of neighbouring elements of a tensor from which the `top_k` largest are sent (SparseLoCo, arXiv:2508.15706)."""


EVERY_STEP: dict[str, Any] = {"inner_steps": 1, "lr": 1.0, "momentum": 0.0}
"""Values that `method = "data-parallel"` gives to keys of `SitesSpec`."""


class LinkSpec(Spec):
    """The link between each two sites, for predictions."""

    megabits: PositiveFloat = Field(description="millions of bits a second, in each direction")
    milliseconds: NonNegativeFloat = Field(description="time of a round trip")


class TlsSpec(Spec):
    """PEM files for the encryption of a site's connections, on each machine that leads a site."""

    certificate: Path = Field(description="this site's certificate, which contains its address")
    key: Path = Field(description="the private key of that certificate")
    authority: Path = Field(description="certificate of the authority that signed the certificates of all sites")


def usual_name(site: int) -> str:
    """Return the name of a site without a name in the run file."""
    return f"site {site}"


class SiteSpec(Spec):
    """The name, the devices, the plan and the share of one site."""

    name: str | None = Field(
        default=None, description='name of this site in messages, events and pages; default: its number, such as "site 0"'
    )
    cluster: str | None = Field(default=None, description="devices of this site, for `megalith plan`; default: the run's cluster")
    plan: Plan | None = Field(default=None, description="the whole plan of this site; default: the run's [plan]")
    share: PositiveInt | None = Field(
        default=None,
        description="relative number of samples of each step that this site reads; default: the ranks of its plan",
    )

    @property
    def differs(self) -> bool:
        """True if the table sets more than a name."""
        return (self.cluster, self.plan, self.share) != (None, None, None)


class SitesSpec(Spec):
    """Groups of ranks that train apart and merge their weights every `inner_steps` steps."""

    method: Literal["merge", "data-parallel"] = Field(
        default="merge",
        description="data-parallel: sites exchange gradients in every step, and all make the same update; merge: they exchange weights",
    )
    count: PositiveInt = Field(default=2, le=64, description="number of sites; each runs the whole plan on ranks of its own")
    inner_steps: PositiveInt = Field(default=30, description="steps between two merges of the same weights")
    fragments: PositiveInt = Field(
        default=1, description="number of parts of the model that are merged one after the other, spread over inner_steps"
    )
    overlap: NonNegativeInt = Field(
        default=0, description="steps that a site computes between sending a fragment and using its merge"
    )
    mixing: NonNegativeFloat | None = Field(
        default=None,
        le=1.0,
        description="share of a site's own weights when it mixes them with merged ones; default: 0.5 with overlap, else 0",
    )
    bits: Literal[2, 4, 8, 32] = Field(
        default=32, description="bits of each element of a difference on the network; vectors are always sent in fp32"
    )
    top_k: PositiveInt | None = Field(
        default=None,
        lt=CHUNK,
        description="number of largest elements that are sent from each 4,096 elements of a matrix; default: all are sent",
    )
    error_feedback: bool = Field(
        default=True, description="add the part of a difference that rounding or top_k dropped to the next difference"
    )
    feedback_decay: PositiveFloat = Field(
        default=1.0, le=1.0, description="share of the dropped part that is carried from one difference to the next"
    )
    staleness: NonNegativeInt = Field(
        default=0,
        le=15,
        description="number of merges of its fragment that a site's difference may miss. 0: a merge waits for all "
        "sites; above 0: a merge waits only for a quorum",
    )
    eager: bool = Field(
        default=False,
        description="take the outer step with the site's own difference at once, and correct it when the other sites' differences arrive",
    )
    lr: PositiveFloat = Field(default=0.7, description="outer learning rate")
    momentum: NonNegativeFloat = Field(default=0.9, lt=1.0, description="outer momentum; 0 keeps no velocity")
    nesterov: bool = Field(default=True, description="Nesterov momentum for the outer step")
    place: Literal["device", "host"] = Field(
        default="device",
        description="device | host: place of anchors, velocities and rounding errors; in host memory, merges update them there",
    )
    site: NonNegativeInt | None = Field(
        default=None, description="number of the site that this command trains; default: this machine trains all sites"
    )
    addresses: tuple[str, ...] = Field(
        default=(),
        description='"HOST:PORT" of each site\'s first machine, by which other sites reach it; default: all sites are on this machine',
    )
    decides: NonNegativeInt | None = Field(
        default=None,
        description="number of the site whose presence is enough for a quorum; default: a quorum is more than half of the sites",
    )
    grace: PositiveFloat | None = Field(
        default=None,
        description="seconds that a merge waits for a site; default: the time of inner_steps steps, and 5 s at least",
    )
    each: tuple[SiteSpec, ...] = Field(
        default=(), description="a table for each site, in the order of their numbers; default: all sites are alike"
    )
    replay: tuple[str, ...] = Field(
        default=(),
        description="folders of a run whose recorded merges this run repeats, as `megalith replay` does; default: none",
    )
    link: LinkSpec | None = Field(
        default=None,
        description="link between the sites, with which `megalith plan` chooses a method and predicts waits; default: no prediction",
    )
    tls: TlsSpec | None = Field(default=None, description="encrypt connections between sites; default: authenticate them only")

    @model_validator(mode="after")
    def _every_step(self) -> Self:
        """Set keys that the table leaves out to the values of data parallelism. A `mode="before"` validator would make
        pydantic refuse lists in place of tuples."""
        for key, value in EVERY_STEP.items() if self.exchanges_gradients else ():
            if key not in self.model_fields_set:
                object.__setattr__(self, key, value)  # specs are frozen once they are validated
                self.model_fields_set.add(key)
        return self

    @property
    def exchanges_gradients(self) -> bool:
        """True if sites exchange gradients in every step."""
        return self.method == "data-parallel"

    @property
    def own_share(self) -> float:
        """The share of a site's own weights in its weights after a merge."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.overlap else 0.0

    @property
    def shares(self) -> tuple[int, ...]:
        """The sites' relative shares of a step's samples; empty if they are equal. Only for a run that `at_site` returned."""
        given = [one.share or 1 for one in self.each]
        return tuple(share // gcd(*given) for share in given) if len(set(given)) > 1 else ()

    def named(self, site: int) -> str:
        """Return the name of a site."""
        own = self.each[site].name if site < len(self.each) else None
        return usual_name(site) if own is None else own

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each site; empty if the run file gives none."""
        given = any(one.name is not None for one in self.each)
        return tuple(self.named(site) for site in range(self.count)) if given else ()

    @property
    def parts(self) -> int:
        """The number of equal parts into which a step's samples are divided: each site reads whole parts."""
        return sum(self.shares) or self.count

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each site; empty if all sites have the run's plan. Only for a run that `at_site` returned."""
        return tuple(one.plan for one in self.each if one.plan is not None)

    @property
    def feeds_back(self) -> bool:
        """True if the unsent part of a difference is added to the next difference."""
        return self.error_feedback and (self.bits < FULL or self.top_k is not None)

    @property
    def flies(self) -> bool:
        """True if a site's differences may be in flight when the site saves a checkpoint."""
        return bool(self.overlap or self.staleness)

    def quorum(self, sites: Collection[int]) -> bool:
        """True if these sites may merge without the others. They must be more than half of all sites, or contain the site
        that `decides` names. Sites that exchange gradients need all sites."""
        if self.exchanges_gradients:
            return len(set(sites)) == self.count
        return self.decides in sites if self.decides is not None else 2 * len(set(sites)) > self.count

    @property
    def lead(self) -> int:
        """The largest number of steps that a site may be ahead of another: the steps between two merges, plus those while a
        fragment is in flight, plus those by which a difference may be late."""
        return -(-self.inner_steps // self.fragments) + self.overlap + self.staleness * self.inner_steps


def at_site(spec: "RunSpec", site: int | None = None) -> "RunSpec":
    """Return a run as the command of one site trains it. Its cluster and plan are those of the site; the table of each site
    states its plan and share, and its cluster if any table did. `site`: number of the site; None: the run's `sites.site`,
    else 0. A run whose tables only name sites, or that has none, is returned unchanged."""
    if spec.sites is None or not any(one.differs for one in spec.sites.each):
        return spec
    number = (spec.sites.site or 0) if site is None else site
    named = any(one.cluster is not None for one in spec.sites.each)

    def whole(one: SiteSpec) -> SiteSpec:
        plan = one.plan or spec.plan
        cluster = (one.cluster or spec.cluster) if named else None
        return SiteSpec(name=one.name, cluster=cluster, plan=plan, share=one.share or plan.ranks)

    each = tuple(map(whole, spec.sites.each))
    sites, here = spec.sites.model_copy(update={"each": each}), each[number] if number < len(each) else SiteSpec()
    return spec.model_copy(update={"sites": sites, "plan": here.plan or spec.plan, "cluster": here.cluster or spec.cluster})


def own_batch(spec: "RunSpec") -> int:
    """Return the number of samples that the run's own site reads in a step; the whole batch if the run has no sites."""
    sites, batch = spec.sites, spec.train.global_batch
    return batch if sites is None else part_of_batch(batch, sites.site or 0, sites.count, sites.shares)


def part_of_batch(batch: int, site: int, count: int, shares: Sequence[int]) -> int:
    """Return the number of samples of one site in a step of `batch` samples, if `count` sites divide the step. `shares`: as
    in `SitesSpec`."""
    return batch * shares[site] // sum(shares) if site < len(shares) else batch // count


def unit_of(spec: "RunSpec") -> int:
    """Return a number of samples whose multiples the ranks of every site can divide evenly."""
    plans = (spec.plan,) if spec.sites is None or not spec.sites.plans else spec.sites.plans
    return lcm(*(plan.data * plan.microbatch for plan in plans))


def within(spec: "RunSpec", size: int | None = None) -> "RunSpec":
    """Return a run as one of its sites trains it: without other sites, and with the site's share of the global batch, or a
    step of `size` samples."""
    if spec.sites is None:
        return spec
    train = spec.train.model_copy(update={"global_batch": size or own_batch(spec)})
    return spec.model_copy(update={"train": train, "sites": None})


def kept(spec: "RunSpec") -> int:
    """Return how many of its newest checkpoints a run keeps. Sites resume from a common checkpoint, so a site that is ahead
    must still have the newest checkpoint that both saved."""
    keep, every = spec.checkpoint.keep, spec.checkpoint.every
    return keep if spec.sites is None or not every else max(keep, 2 + -(-spec.sites.lead // every))


def folder_of(run_dir: Path, site: int) -> Path:
    """Return the folder of a site, if all sites of the run are on one machine. `run_dir`: the run's folder, which is also the
    first site's."""
    return run_dir if site == 0 else run_dir / f"site-{site}"
