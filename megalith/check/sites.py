"""Rules about sites that train separately and merge their weights."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megalith.check.case import Case, Found, advice, error
from megalith.spec import cluster as clusters
from megalith.spec.model import MoeSpec
from megalith.spec.numbers import PRECISIONS
from megalith.spec.problem import SpecErrors
from megalith.spec.run import RunSpec
from megalith.spec.sites import EVERY_STEP, FULL, SitesSpec

LONGEST_NAME = 40
"""Largest number of characters of a site's name, which appears in tables and sentences."""
MAX_PORT = 65535


def merges_fit_the_round(case: Case) -> Found:
    """Each fragment is merged once every `inner_steps` steps, and its merge ends before the fragment is sent again."""
    sites, steps = case.spec.sites, case.spec.train.steps
    if sites is None:
        return
    if sites.overlap >= sites.inner_steps:
        reason = f"is not below sites.inner_steps = {sites.inner_steps}: a fragment would be sent again before it has arrived"
        yield error("sites.overlap", sites.overlap, reason, f"Use overlap = {max(0, sites.inner_steps - 1)} at most.")
    if sites.fragments > sites.inner_steps:
        reason = f"cannot be spread over sites.inner_steps = {sites.inner_steps} steps"
        yield error("sites.fragments", sites.fragments, reason, f"Use fragments = {sites.inner_steps} at most.")
    if sites.inner_steps > steps:
        reason = f"is longer than the run of {steps} steps: sites would merge only at its end"
        fewer = max(1, steps // 10, sites.fragments, sites.overlap + 1)
        if fewer <= steps:
            way_out = f"Use inner_steps = {fewer}, say."
        else:
            way_out = f"Use inner_steps = {max(1, steps // 10)}, say, with fewer fragments and less overlap."
        yield advice("sites.inner_steps", sites.inner_steps, reason, way_out)


def methods_are_whole(case: Case) -> Found:
    """Options of merges fit together: elements that a merge does not send are sent by a later merge, and `eager` needs overlap."""
    sites = case.spec.sites
    if sites is None:
        return
    if sites.top_k is not None and not sites.error_feedback:
        reason = f"with sites.top_k = {sites.top_k} loses all but the largest elements of a difference"
        yield error("sites.error_feedback", False, reason, "Leave out this key, or sites.top_k.")
    if sites.top_k is not None and sites.momentum:
        reason = (
            f"with sites.top_k = {sites.top_k} applies momentum twice: the unsent part that is fed back already acts "
            "as momentum (SparseLoCo)"
        )
        yield advice("sites.momentum", sites.momentum, reason, "Use momentum = 0.0, lr = 1.0 and feedback_decay = 0.95.")
    if sites.feedback_decay < 1.0 and not sites.feeds_back:
        reason = "forgets a share of the unsent part of differences, but no part is unsent, or it is not fed back"
        yield advice("sites.feedback_decay", sites.feedback_decay, reason, "Remove this key, or use sites.top_k or fewer bits.")
    if sites.eager and not sites.overlap:
        reason = (
            "applies a site's own difference while the other sites' differences are in flight, but with sites.overlap = 0 no "
            "step runs meanwhile"
        )
        most = sites.inner_steps - 1
        way_out = (
            f"Use overlap = 1{f' to {most}' * (most > 1)}, or leave sites.eager out."
            if most
            else "Raise sites.inner_steps, or leave sites.eager out."
        )
        yield error("sites.eager", True, reason, way_out)
    if sites.eager and sites.mixing is not None:
        reason = "mixes a site's own weights with merged weights, but sites.eager keeps a site's own training in full"
        yield error("sites.mixing", sites.mixing, reason, "Remove sites.mixing or sites.eager.")


def asynchronous_merges_need_no_site(case: Case) -> Found:
    """Asynchronous merges need a quorum that does not require every site, and exclude `eager`, which would correct a difference that may
    come later."""
    sites = case.spec.sites
    if sites is None or not sites.staleness:
        return
    if sites.eager:
        reason = (
            f"corrects an outer step at the next merge, but with sites.staleness = {sites.staleness} the difference "
            "may come in a later merge"
        )
        yield error("sites.eager", True, reason, "Remove sites.eager or sites.staleness.")
    if not any(sites.quorum(set(range(sites.count)) - {site}) for site in range(sites.count)):
        reason = (
            f"allows late differences, but a quorum of {sites.count} sites needs every site, so each merge waits for all sites"
        )
        yield advice(
            "sites.staleness", sites.staleness, reason, "Set sites.decides = 0, use three sites, or leave out sites.staleness."
        )


def gradients_can_be_exchanged(case: Case) -> Found:
    """Sites that exchange gradients make the same update of the whole model in every step."""
    sites = case.spec.sites
    if sites is None or not sites.exchanges_gradients:
        return
    plain = EVERY_STEP | {
        "fragments": 1,
        "overlap": 0,
        "bits": FULL,
        "mixing": None,
        "top_k": None,
        "eager": False,
        "staleness": 0,
        "decides": None,
        "grace": None,
        "nesterov": True,
        "error_feedback": True,
        "feedback_decay": 1.0,
        "place": "device",
    }
    for key, value in plain.items():
        if (given := getattr(sites, key)) != value:
            reason = 'concerns merges of weights, but sites.method = "data-parallel" exchanges whole gradients in every step'
            yield error(f"sites.{key}", given, reason, 'Remove this key, or use method = "merge".')
    for key, value, reason in made_apart(case.spec, experts=any(isinstance(block.mlp, MoeSpec) for block in case.blocks)):
        reason = f'{reason}, but with sites.method = "data-parallel" all sites must make the same update'
        yield error(key, value, reason, 'Use method = "merge".')


def made_apart(spec: RunSpec, *, experts: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield settings that would make the updates of sites with equal gradients differ: key, value and reason. `experts`: True
    if the model has experts."""
    if experts:
        yield "sites.method", "data-parallel", "does not support models with experts: loads are counted within each site"
    if spec.optimizer.qk_clip:
        yield "optimizer.qk_clip", spec.optimizer.qk_clip, "scales heads by the logits of one site"
    if (sites := spec.sites) is None:
        return
    if len(set(sites.plans)) > 1:
        yield "sites.each", len(sites.each), "gives sites different plans, which round sums differently"
    if len(devices := _devices(sites)) > 1:
        reason = f"gives sites different devices ({', '.join(devices)}), whose kernels round differently"
        yield "sites.each", len(sites.each), reason


def _devices(sites: SitesSpec) -> list[str]:
    """Return the kinds of devices of the clusters that sites name. `sites` comes from a run that `at_site` returned."""
    found = dict[str, None]()
    for name in filter(None, (one.cluster for one in sites.each)):
        with suppress(SpecErrors):  # another rule reports a cluster that is not known
            found[clusters.load(name).accelerator.name] = None
    return [*found]


def fragments_have_parts(case: Case) -> Found:
    """A fragment has at least one part of the model: the embedding, a block or the head."""
    sites = case.spec.sites
    if sites is None or case.model is None:
        return
    parts = len(case.model.blocks) + 2
    if sites.fragments > parts:
        reason = f"is more than the model's {parts} parts (embedding, {parts - 2} blocks, head)"
        yield error("sites.fragments", sites.fragments, reason, f"Use fragments = {parts} at most.")


def sites_stay_together(case: Case) -> Found:
    """All sites make an update in every step, and apply each merge at the same step. Options that could change one site alone
    are refused."""
    spec = case.spec
    if spec.sites is None:
        return
    apart = "lets one site skip or undo updates that others make, but all sites must make the same number of updates"
    if spec.stability.answers:
        yield error(
            "stability.answers", list(spec.stability.answers), apart, "Remove this key: a run with sites only warns of spikes."
        )
    if spec.stability.not_finite == "skip":
        yield error("stability.not_finite", "skip", apart, 'Use not_finite = "stop".')
    if PRECISIONS[spec.train.precision].scaled:
        reason = "skips updates whose gradients overflow, but all sites must make the same number of updates"
        yield error("train.precision", spec.train.precision, reason, 'Use precision = "bf16".')
    if case.plan.post_validation:
        reason = "may undo an update after its weights were sent to the other sites"
        yield error("plan.post_validation", True, reason, "Use post_validation = false.")
    if case.plan.state.release and spec.sites.exchanges_gradients:
        reason = "updates weights within the backward, before sites have exchanged their gradients"
        yield error("plan.state.release", True, reason, 'Use release = false, or method = "merge".')
    if spec.fleet.fallback is not None:
        reason = "would give one site fewer ranks, but every site needs the plan's ranks"
        yield error("fleet.fallback", spec.fleet.fallback.ranks, reason, "Leave it out.")
    if spec.branch is not None:
        reason = "begins with the state of one run, but each site of this run has its own state"
        yield error("branch", spec.branch.checkpoint, reason, "Use train.init_from, which starts all sites from merged weights.")


def guards_repeat_no_exchange(case: Case) -> Found:
    """Gradients are recomputed within a site only where no other site waits for them in the same step."""
    sites, fleet = case.spec.sites, case.spec.fleet
    if sites is not None and sites.exchanges_gradients and fleet.recover and fleet.verify_every:
        reason = (
            'recomputes gradients, but with sites.method = "data-parallel" a run has no guards: a site that repeats a step '
            "would exchange its gradients again"
        )
        yield error("fleet.verify_every", fleet.verify_every, reason, 'Use verify_every = 0, or method = "merge".')


def addresses_are_each_sites(case: Case) -> Found:
    """Either every site has an address of its own with a port, or no site has one."""
    sites = case.spec.sites
    if sites is None:
        return
    if sites.addresses and len(sites.addresses) != sites.count:
        reason = f"has {len(sites.addresses)} addresses for sites.count = {sites.count}"
        yield error(
            "sites.addresses",
            list(sites.addresses),
            reason,
            "Give one address for each site, or none if all sites are on one machine.",
        )
    for address in sites.addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
            reason = (
                f"has {address}, but each address must be HOST:PORT, with a port from 1 to {MAX_PORT}: a site's first machine "
                "listens at a port"
            )
            yield error("sites.addresses", list(sites.addresses), reason, 'Write HOST:PORT, such as "oslo.example.org:29400".')
    if twice := next((one for one, times in Counter(sites.addresses).items() if times > 1), None):
        reason = f"has {twice} more than once, but two sites cannot listen at one address"
        yield error("sites.addresses", list(sites.addresses), reason, "Give each site an address of its own.")


def certificates_are_there(case: Case) -> Found:
    """The files that `sites.tls` names can be read. If the site's ranks may run on several nodes, this machine need not lead the site."""
    sites = case.spec.sites
    if sites is None or sites.tls is None or sites.count == 1 or not case.files:
        return
    report = error if case.spec.fleet.nodes == 1 and case.world is None else advice
    for key, file in sites.tls:
        if not (file.is_file() and os.access(file, os.R_OK)):
            reason = f"{'cannot be read' if file.exists() else 'does not exist'} on this machine, so this site could not begin"
            way_out = "Give the path of a PEM file; docs/guide/sites.md has the commands that create the three files."
            yield report(f"sites.tls.{key}", str(file), reason, way_out)


def sites_are_numbered(case: Case) -> Found:
    """Numbers of sites are below `sites.count`, and `sites.site` is set if a launcher starts the ranks."""
    sites = case.spec.sites
    if sites is None:
        return
    for key, number in (("sites.site", sites.site), ("sites.decides", sites.decides)):
        if number is not None and number >= sites.count:
            yield error(
                key, number, f"is not one of the sites 0 to {sites.count - 1}", "Use one of these numbers, or raise sites.count."
            )
    if case.world is not None:
        yield from launched_alone(case.spec)


def each_site_has_a_table(case: Case) -> Found:
    """Every site has a table, or no site has one."""
    sites = case.spec.sites
    if sites is not None and sites.each and len(sites.each) != sites.count:
        reason = f"has {len(sites.each)} tables for sites.count = {sites.count}"
        yield error(
            "sites.each",
            len(sites.each),
            reason,
            "Write one table for each site, in the order of their numbers, or none; or leave out sites.count.",
        )


def names_tell_sites_apart(case: Case) -> Found:
    """The name of a site is short and printable, and no other site has it."""
    sites = case.spec.sites
    seen = dict[str, int]()
    for number in range(sites.count if sites is not None and sites.each else 0):
        assert sites is not None
        name, key = sites.named(number), f"sites.each.{number}.name"
        if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
            reason = f"must have 1 to {LONGEST_NAME} printable characters"
            yield error(key, name, reason, 'Write a name such as "oslo".')
        elif name in seen:
            reason = f"is also the name of site {seen[name]}, so messages could not distinguish these sites"
            yield error(key, name, reason, "Give each site a name of its own.")
        seen.setdefault(name, number)


def each_cluster_has_the_ranks(case: Case) -> Found:
    """Clusters of sites are known, and have a device for each rank of their plans. Other rules check the cluster of this site."""
    sites = case.spec.sites
    for number, one in enumerate(sites.each if sites is not None else ()):
        if one.cluster is None or one.cluster == case.spec.cluster:
            continue
        key, plan = f"sites.each.{number}.cluster", one.plan or case.plan
        try:
            there = clusters.load(one.cluster)
        except SpecErrors as errors:
            yield from (replace(problem, key=key) for problem in errors.problems)
            continue
        if clusters.counted(one.cluster) and there.count < plan.ranks:
            reason = f"has {there.count} devices, but sites.each.{number}.plan has {plan.ranks} ranks"
            yield error(key, one.cluster, reason, f"Use {there.accelerator.name}:{plan.ranks}, or a smaller plan.")


def launched_alone(spec: RunSpec) -> Found:
    """A launcher starts the ranks of one site only, so `sites.site` must be set."""
    sites = spec.sites
    if sites is not None and sites.count > 1 and sites.site is None:
        reason = "is not set, but a launcher starts the ranks of only one site"
        yield error("sites.site", None, reason, "Launch each site with --set sites.site=0, 1 and so on, and its own run folder.")


def faults_go_back_to_checkpoints(case: Case) -> Found:
    """A run with sites saves checkpoints, because it keeps no copies of its state in memory."""
    spec = case.spec
    if spec.sites is not None and spec.fleet.recover and not spec.checkpoint.every:
        reason = (
            "saves nothing before the end, and a run with sites keeps no copies in memory: all progress is lost if too many "
            "sites fail"
        )
        often = max(spec.sites.inner_steps, min(100, spec.train.steps // 10 or 1))
        yield advice("checkpoint.every", 0, reason, f"For example, use checkpoint.every = {often}.")
