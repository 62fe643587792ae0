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
"""Bits of an element that sites send without rounding, in fp32."""
CHUNK = 4096
"""Number of neighbouring elements of a tensor from which the `top_k` largest are sent (SparseLoCo, arXiv:2508.15706)."""
MAX_SITES = 64
"""Largest number of sites: messages have a bit for each."""

EVERY_STEP: dict[str, Any] = {"inner_steps": 1, "lr": 1.0, "momentum": 0.0}
"""Values that `method = "data-parallel"` gives to keys of `SitesSpec`."""


class LinkSpec(Spec):
    """The network link between any two sites, for predictions."""

    megabits: PositiveFloat = Field(description="millions of bits per second, in each direction")
    milliseconds: NonNegativeFloat = Field(description="milliseconds of a round trip")


class TlsSpec(Spec):
    """PEM files for the encryption of connections between sites. Each machine that leads a site needs these files."""

    certificate: Path = Field(description="this site's certificate, which contains its address")
    key: Path = Field(description="the private key of that certificate")
    authority: Path = Field(description="certificate of the authority that signed the certificates of all sites")


def usual_name(site: int) -> str:
    """Return the name of a site that has no name in the run file."""
    return f"site {site}"


class SiteSpec(Spec):
    """The name, the devices, the plan and the share of one site."""

    name: str | None = Field(
        default=None,
        description='name of this site in messages, events and reports; default: "site" and its number, such as "site 0"',
    )
    cluster: str | None = Field(default=None, description="devices of this site, for `megalith plan`; default: the run's cluster")
    plan: Plan | None = Field(default=None, description="the whole plan of this site; default: the run's [plan]")
    share: PositiveInt | None = Field(
        default=None,
        description="relative size of this site's part of each step's batch; default: the number of ranks in its plan",
    )

    @property
    def differs(self) -> bool:
        """True if the site's table sets more than a name."""
        return (self.cluster, self.plan, self.share) != (None, None, None)


class SitesSpec(Spec):
    """Sites: groups of ranks that train separately and merge their weights every `inner_steps` steps, or exchange gradients in
    every step (`method = "data-parallel"`)."""

    method: Literal["merge", "data-parallel"] = Field(
        default="merge",
        description="data-parallel: sites exchange gradients in every step, so that all make the same update; merge: sites "
        "exchange weight differences every inner_steps steps",
    )
    count: PositiveInt = Field(
        default=2,
        le=MAX_SITES,
        description="number of sites; each site runs the whole plan on its own ranks; default: the number of tables in sites.each, else 2",
    )
    inner_steps: PositiveInt = Field(default=30, description="steps between two merges of the same weights")
    fragments: PositiveInt = Field(
        default=1,
        description="number of fragments into which the model is divided; their merges are spread evenly over inner_steps steps",
    )
    overlap: NonNegativeInt = Field(
        default=0, description="steps that a site trains between sending a fragment and receiving the merged weights"
    )
    mixing: NonNegativeFloat | None = Field(
        default=None,
        le=1.0,
        description="share of a site's own weights in its weights after a merge; the rest are merged weights; default: 0.5 "
        "with overlap, else 0",
    )
    bits: Literal[2, 4, 8, 32] = Field(
        default=32, description="bits of each element of the weight differences that sites send; vectors are always sent in fp32"
    )
    top_k: PositiveInt | None = Field(
        default=None,
        lt=CHUNK,
        description="of each 4,096 elements of a matrix, sites send only this number of largest ones; default: all are sent",
    )
    error_feedback: bool = Field(
        default=True, description="add what rounding or top_k removes from a weight difference to the next difference"
    )
    feedback_decay: PositiveFloat = Field(
        default=1.0,
        le=1.0,
        description="factor by which the removed part is multiplied before error_feedback adds it to the next difference",
    )
    staleness: NonNegativeInt = Field(
        default=0,
        le=15,
        description="number of merges of a fragment that a site's weight difference may miss. 0: a merge waits for all sites; "
        "above 0: a merge waits only for a quorum",
    )
    eager: bool = Field(
        default=False,
        description="make the outer step with the site's own weight difference at once, and correct it when the other sites' "
        "differences arrive",
    )
    lr: PositiveFloat = Field(default=0.7, description="outer learning rate")
    momentum: NonNegativeFloat = Field(default=0.9, lt=1.0, description="outer momentum; 0: no velocity is kept")
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
        description='"HOST:PORT" at which the first machine of each site is reached by other sites; default: all sites are on this machine',
    )
    decides: NonNegativeInt | None = Field(
        default=None,
        description="number of a site: any group of sites that includes it is a quorum; default: more than half of the sites are a quorum",
    )
    grace: PositiveFloat | None = Field(
        default=None,
        description="seconds that a merge waits for a missing site; default: the time of inner_steps steps, and at least 5 s",
    )
    each: tuple[SiteSpec, ...] = Field(
        default=(),
        description="list with one table for each site, in the order of the sites' numbers; default: all sites are equal",
    )
    replay: tuple[str, ...] = Field(
        default=(),
        description="folders of an earlier run; this run repeats the merges recorded there, as `megalith replay` does; default: none",
    )
    link: LinkSpec | None = Field(
        default=None,
        description="network link between sites, from which `megalith plan` chooses a method and predicts waiting times; "
        "default: no prediction",
    )
    tls: TlsSpec | None = Field(
        default=None,
        description="files for the encryption of connections between sites; default: connections are only authenticated",
    )

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Set keys that the table leaves out: with `method = "data-parallel"` to EVERY_STEP, and `count` to the number of tables in `each`.
        A `mode="before"` validator would make pydantic refuse lists in place of tuples."""
        counted = {"count": len(self.each)} if 0 < len(self.each) <= MAX_SITES else {}
        for key, value in (counted | (EVERY_STEP if self.exchanges_gradients else {})).items():
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
        """Relative sizes of the sites' parts of a step's batch; empty if the parts are equal. Valid only for a run that `at_site`
        returned."""
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
        """The number of equal units into which a step's batch is divided, of which each site reads a whole number."""
        return sum(self.shares) or self.count

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each site; empty if all sites have the run's plan. Valid only for a run that `at_site` returned."""
        return tuple(one.plan for one in self.each if one.plan is not None)

    @property
    def feeds_back(self) -> bool:
        """True if the unsent part of a weight difference is added to the next one."""
        return self.error_feedback and (self.bits < FULL or self.top_k is not None)

    @property
    def flies(self) -> bool:
        """True if a site may save a checkpoint while a merge that includes its differences is pending."""
        return bool(self.overlap or self.staleness)

    def quorum(self, sites: Collection[int]) -> bool:
        """True if `sites` may merge without the others: if they contain the site that `decides` names, or, without `decides`, if
        they are more than half of all sites. Sites that exchange gradients in every step must all be present."""
        if self.exchanges_gradients:
            return len(set(sites)) == self.count
        return self.decides in sites if self.decides is not None else 2 * len(set(sites)) > self.count

    @property
    def lead(self) -> int:
        """The largest number of steps by which a site may be ahead of another: the steps between two merges, plus `overlap`, plus
        the steps by which a difference may be late."""
        return -(-self.inner_steps // self.fragments) + self.overlap + self.staleness * self.inner_steps


def at_site(spec: "RunSpec", site: int | None = None) -> "RunSpec":
    """Return the run as one site trains it: with the cluster and plan of that site, and with the plan and share of each site
    filled in under `sites.each`. `site`: number of the site; None: the run's `sites.site`, else 0. A run without sites, or whose
    sites differ only in their names, is returned unchanged."""
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


def computed_size(spec: "RunSpec", samples: int) -> int:
    """Return the number of sequences that the run's own site computes in a step in which it reads `samples` samples: a multiple of
    its part of a batch, because every plan can divide that evenly. The sequences beyond `samples` have no targets."""
    part = own_batch(spec)
    return -(-samples // part) * part


def unit_of(spec: "RunSpec") -> int:
    """Return the smallest number of samples that the data ranks of every site can divide evenly into microbatches."""
    plans = (spec.plan,) if spec.sites is None or not spec.sites.plans else spec.sites.plans
    return lcm(*(plan.data * plan.microbatch for plan in plans))


def within(spec: "RunSpec", size: int | None = None) -> "RunSpec":
    """Return the run of one site alone: with the site's part of the global batch (or `size` samples), and without the table
    `[sites]`."""
    if spec.sites is None:
        return spec
    train = spec.train.model_copy(update={"global_batch": size or own_batch(spec)})
    return spec.model_copy(update={"train": train, "sites": None})


def kept(spec: "RunSpec") -> int:
    """Return how many checkpoints a run keeps. Sites resume from a checkpoint that all of them have, so a site that is ahead must
    keep older ones."""
    keep, every = spec.checkpoint.keep, spec.checkpoint.every
    return keep if spec.sites is None or not every else max(keep, 2 + -(-spec.sites.lead // every))


def folder_of(run_dir: Path, site: int) -> Path:
    """Return the folder of a site, if all sites are on one machine. `run_dir`: the run folder, which is also the folder of site
    0."""
    return run_dir if site == 0 else run_dir / f"site-{site}"
