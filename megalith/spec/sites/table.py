"""The table `[sites]` of a run file, and a run as one of its sites sees it. No torch."""

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
"""Neighbouring elements of a tensor of which the largest are sent, where `top_k` says so (SparseLoCo, arXiv:2508.15706)."""


EVERY_STEP: dict[str, Any] = {"inner_steps": 1, "lr": 1.0, "momentum": 0.0}
"""Keys of `SitesSpec` that data parallelism has other values of than merges."""


class LinkSpec(Spec):
    """The link between each two sites, for predictions."""

    megabits: PositiveFloat = Field(description="millions of bits a second, in each direction")
    milliseconds: NonNegativeFloat = Field(description="time of a round trip")


class TlsSpec(Spec):
    """Files in PEM for the encryption of a site's connections, on each machine that leads a site."""

    certificate: Path = Field(description="this site's certificate, which names its address")
    key: Path = Field(description="the private key of that certificate")
    authority: Path = Field(description="certificate of the authority that signed the certificates of all sites")


def usual_name(site: int) -> str:
    """Return the name of a site that the run file gives none."""
    return f"site {site}"


class SiteSpec(Spec):
    """The name, the devices, the plan and the share of one site."""

    name: str | None = Field(
        default=None, description='name of this site in messages, events and pages; default: its number, such as "site 0"'
    )
    cluster: str | None = Field(
        default=None, description="devices of this site, which `megalith plan` plans for; default: the run's cluster"
    )
    plan: Plan | None = Field(default=None, description="the whole plan of this site; default: the run's [plan]")
    share: PositiveInt | None = Field(
        default=None,
        description="samples of every step that this site reads, as parts of the sum over all sites; default: the ranks of its plan",
    )

    @property
    def differs(self) -> bool:
        """True if the table has more than a name."""
        return (self.cluster, self.plan, self.share) != (None, None, None)


class SitesSpec(Spec):
    """Groups of ranks that train apart and merge their weights every `inner_steps` steps."""

    method: Literal["merge", "data-parallel"] = Field(
        default="merge",
        description="data-parallel: sites exchange gradients in every step, and all make the same update; merge: they exchange weights",
    )
    count: PositiveInt = Field(default=2, le=64, description="sites; each runs the whole plan on ranks of its own")
    inner_steps: PositiveInt = Field(default=30, description="steps of a site between two merges of the same weights")
    fragments: PositiveInt = Field(
        default=1, description="parts of the model that are merged one after the other, spread over inner_steps"
    )
    overlap: NonNegativeInt = Field(default=0, description="steps that a site computes while a fragment is under way")
    mixing: NonNegativeFloat | None = Field(
        default=None,
        le=1.0,
        description="share of a site's own weights when it mixes them with merged ones; default: 0.5 with overlap, else 0",
    )
    bits: Literal[2, 4, 8, 32] = Field(
        default=32, description="bits of each element of a difference that is sent; vectors are always sent in fp32"
    )
    top_k: PositiveInt | None = Field(
        default=None,
        lt=CHUNK,
        description="how many of the largest elements are sent of each 4,096 of a matrix; default: all are sent",
    )
    error_feedback: bool = Field(default=True, description="add what rounding or top_k left out to the next difference")
    feedback_decay: PositiveFloat = Field(
        default=1.0, le=1.0, description="share of what was left out that is kept from one difference to the next"
    )
    staleness: NonNegativeInt = Field(
        default=0,
        le=15,
        description="merges of its fragment that a site's difference may miss before it is merged. 0: a merge waits for all "
        "sites; above 0: only for a quorum",
    )
    eager: bool = Field(
        default=False,
        description="take the outer step with the site's own difference at once, and with the others' when they arrive",
    )
    lr: PositiveFloat = Field(default=0.7, description="outer learning rate")
    momentum: NonNegativeFloat = Field(default=0.9, lt=1.0, description="outer momentum; 0 keeps no velocity")
    nesterov: bool = Field(default=True, description="outer momentum looks one merge ahead")
    site: NonNegativeInt | None = Field(
        default=None, description="number of the site that this command trains; default: all of them, on this machine"
    )
    addresses: tuple[str, ...] = Field(
        default=(),
        description='"HOST:PORT" of each site\'s first machine, by which the others reach it; default: all on this machine',
    )
    decides: NonNegativeInt | None = Field(
        default=None,
        description="number of the site whose presence is enough for a quorum; default: more than half of the sites must be present",
    )
    grace: PositiveFloat | None = Field(
        default=None,
        description="seconds that a merge waits for a site; default: as long as inner_steps steps take, and 5 s at least",
    )
    each: tuple[SiteSpec, ...] = Field(
        default=(), description="a table for each site, in the order of their numbers; default: all sites are alike"
    )
    replay: tuple[str, ...] = Field(
        default=(), description="folders of a run whose recorded merges are repeated, as `megalith replay` does; default: none"
    )
    link: LinkSpec | None = Field(
        default=None,
        description="link between the sites, for which `megalith plan` chooses a method and predicts waits; default: it "
        "predicts none",
    )
    tls: TlsSpec | None = Field(default=None, description="encrypt connections between sites; default: authenticate them only")

    @model_validator(mode="after")
    def _every_step(self) -> Self:
        """Fill in the settings of merges that the table leaves out with those of data parallelism. A validator that runs before would
        make pydantic refuse lists in place of tuples."""
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
        """The division of a step's samples among the sites; empty if it is even. Only for a run that `at_site` returned."""
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
        """The smallest number of equal parts in which a step's samples can be divided among the sites."""
        return sum(self.shares) or self.count

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each site; empty if all have the run's. Only for a run that `at_site` returned."""
        return tuple(one.plan for one in self.each if one.plan is not None)

    @property
    def feeds_back(self) -> bool:
        """True if the part that is not sent of a difference is added to the next one."""
        return self.error_feedback and (self.bits < FULL or self.top_k is not None)

    @property
    def flies(self) -> bool:
        """True if a site's differences may still be under way when it saves a checkpoint."""
        return bool(self.overlap or self.staleness)

    def quorum(self, sites: Collection[int]) -> bool:
        """True if these sites may merge without the others: more than half of all, or those with the one that `decides` names. Exchanged
        gradients need all sites."""
        if self.exchanges_gradients:
            return len(set(sites)) == self.count
        return self.decides in sites if self.decides is not None else 2 * len(set(sites)) > self.count

    @property
    def lead(self) -> int:
        """The most steps that a site may be ahead of another: those between two merges, those while a fragment is in flight, and
        those of the rounds that a difference may be late."""
        return -(-self.inner_steps // self.fragments) + self.overlap + self.staleness * self.inner_steps


def at_site(spec: "RunSpec", site: int | None = None) -> "RunSpec":
    """Return a run as the command of one site trains it: its cluster and plan are that site's, and each site's table gives its plan and
    share, and its cluster if any table does. `site`: its number; None: the one that the run names, else the first. A run without such
    tables, or whose tables only name sites, is returned as it is."""
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
    """Return the number of samples that a site of a run reads in a step; all of them, if the run has no sites."""
    sites, batch = spec.sites, spec.train.global_batch
    return batch if sites is None else part_of_batch(batch, sites.site or 0, sites.count, sites.shares)


def part_of_batch(batch: int, site: int, count: int, shares: Sequence[int]) -> int:
    """Return the number of samples of one site in a step of `batch`, which `count` sites divide. `shares`: as in `SitesSpec`."""
    return batch * shares[site] // sum(shares) if site < len(shares) else batch // count


def unit_of(spec: "RunSpec") -> int:
    """Return a number of samples whose multiples the ranks of every site can divide among each other."""
    plans = (spec.plan,) if spec.sites is None or not spec.sites.plans else spec.sites.plans
    return lcm(*(plan.data * plan.microbatch for plan in plans))


def within(spec: "RunSpec", size: int | None = None) -> "RunSpec":
    """Return a run as one of its sites sees it: its share of the global batch, or a step of `size` samples, and no other sites."""
    if spec.sites is None:
        return spec
    train = spec.train.model_copy(update={"global_batch": size or own_batch(spec)})
    return spec.model_copy(update={"train": train, "sites": None})


def kept(spec: "RunSpec") -> int:
    """Return how many of its newest checkpoints a run keeps. A site that is ahead of another must still have the newest
    checkpoint that both saved: without a common one they could not resume."""
    keep, every = spec.checkpoint.keep, spec.checkpoint.every
    return keep if spec.sites is None or not every else max(keep, 2 + -(-spec.sites.lead // every))


def folder_of(run_dir: Path, site: int) -> Path:
    """Return the folder of a site, if all sites of the run are on one machine. `run_dir`: the first site's, which is the
    run's."""
    return run_dir if site == 0 else run_dir / f"site-{site}"
