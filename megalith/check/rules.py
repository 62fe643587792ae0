"""The table of rules, and the check that applies it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megalith.check import (
    data,
    device,
    fleet,
    memory,
    mesh,
    model,
    moments,
    name,
    narrow,
    optimizer,
    own,
    packed,
    pipeline,
    products,
    retain,
    sites,
    software,
    stability,
    steps,
    weights,
)
from megalith.check.case import Case, Found, error
from megalith.check.resume import other_sets
from megalith.spec.base import AbsentError
from megalith.spec.phases import Phases, during
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import within


class Rule(NamedTuple):
    """A rule whose violation is an error or an advice."""

    subject: str
    """The subject of the rule, which is also the name of this package's module with the rules of this subject."""
    find: Callable[[Case], Found]
    """Function that yields the problems of a case. The function's docstring states the rule."""


def check(
    spec: RunSpec,
    *,
    world: int | None = None,
    files: bool = True,
    begun: bool = False,
    provenance: Mapping[str, str] | None = None,
    remedies: bool = True,
    folder: Path | None = None,
) -> list[Problem]:
    """Return every problem of a run, errors first. An empty list means that the run can start and follows common practice.

    `world` is the number of ranks that were started, if known. With `files=False` no rule reads files. A run that has `begun` resumes
    from its own checkpoints. `provenance` (from `spec.files`) names the source of each value. With `remedies=False` no rule searches for
    changes with which the run fits. `folder` is the run folder (None: the current directory), in which files of state and activations are
    by default. If the spec lacks values (`spec.files.read`), each rule reports only the problems that it finds without the missing values.
    """
    case = Case(spec, world, files, begun, remedies, folder=folder)
    found = found_by(case)
    found += _of_later_phases(case, found)
    origins = provenance or {}
    found = [replace(problem, source=origins.get(problem.key, "")) for problem in found]
    return sorted(_of_its_site(spec, found), key=lambda problem: problem.severity != "error")


def found_by(case: Case, subjects: Collection[str] | None = None) -> list[Problem]:
    """Return the problems that the rules of `subjects` (None: all rules) find in a case; later phases of the run are not checked."""
    rules = (rule for rule in RULES if subjects is None or rule.subject in subjects)
    return [problem for rule in rules for problem in _problems(rule, case)]


def _of_its_site(spec: RunSpec, found: Sequence[Problem]) -> Found:
    """Yield the problems. If this site's table sets a plan or cluster, problems of that plan or cluster get keys of the table."""
    moved = dict[str, str]()
    with suppress(AbsentError):
        if spec.sites is not None and spec.sites.plans:
            number = spec.sites.site or 0
            own = [
                key
                for key in ("plan", "cluster")
                if number < len(spec.sites.each) and getattr(spec.sites.each[number], key) is not None
            ]
            moved = {key: f"sites.each.{number}.{key}" for key in own}
    for problem in found:
        first, dot, rest = problem.key.partition(".")
        yield replace(problem, key=f"{moved[first]}{dot}{rest}") if first in moved else problem


def _problems(rule: Rule, case: Case) -> Found:
    """Yield the problems that a rule finds before it reads a value that the spec lacks."""
    with suppress(AbsentError):
        yield from rule.find(case)


OF_A_PHASE = frozenset(
    (
        "model",
        "mesh",
        "pipeline",
        "memory",
        "tiles_lie_inside_sequences",
        "fallback_can_be_run",
        "each_site_can_train",
        "weighted_domains_exist",
        "weighted_domains_have_text",
    )
)
"""Subjects and single rules that check one step, and therefore apply to each phase. The other rules concern a whole run."""

SET_BY_PHASES = {"train.global_batch": "global_batch", "train.seq_len": "seq_len", "data.weights": "weights"}
"""Keys that a phase may set, with their names in a phase."""


def _of_later_phases(case: Case, known: Sequence[Problem]) -> list[Problem]:
    """Return the problems that first occur in a later phase of a run, under the key of the phase that set the value."""
    found = list[Problem]()
    seen = {(problem.key, problem.reason) for problem in known}
    with suppress(AbsentError):
        for phase in Phases.of(case.spec).all[1:]:
            part = replace(case, spec=during(case.spec, phase), later=True)
            rules = (rule for rule in RULES if {rule.subject, rule.find.__name__} & OF_A_PHASE)
            for problem in (problem for rule in rules for problem in _problems(rule, part)):
                if (problem.key, problem.reason) in seen:
                    continue
                seen.add((problem.key, problem.reason))
                begin, _, rest = problem.key.partition(".weights")
                table = f"{begin}.weights" if rest or problem.key.endswith(".weights") else problem.key
                name = phase.set_by.get(SET_BY_PHASES.get(table, ""), table) + (rest if table != problem.key else "")
                found.append(replace(problem, key=name, reason=f"from sample {phase.first:,} on {problem.reason}"))
    return found


def fallback_can_be_run(case: Case) -> Found:
    """The fallback plan passes the same rules as the run's plan, on fewer nodes with the same number of ranks each.

    This rule is next to `check` because it applies every other rule to the fallback plan.
    """
    spec, ranks = case.spec.fleet, case.plan.ranks
    if spec.fallback is None or spec.nodes == 1 or ranks % spec.nodes:
        return
    each, needed = ranks // spec.nodes, spec.fallback.ranks
    if needed % each or needed >= ranks:
        reason = f"has {needed} ranks, but it must fill whole nodes of {each} ranks, and fewer nodes than the run's {spec.nodes}"
        yield error("fleet.fallback", needed, reason, f"Use a plan of {each} to {ranks - each} ranks, a multiple of {each}.")
    alone = spec.model_copy(update={"fallback": None, "nodes": max(1, needed // each)})
    run = during(case.spec, Phases.of(case.spec).all[0])  # later phases have their turn
    yield from _under(run, {"plan": spec.fallback, "fleet": alone}, "fleet.fallback", remedies=case.remedies)


def each_site_can_train(case: Case) -> Found:
    """The plan of every other site passes the same rules as the plan of this command's site.

    This rule is next to `check` because it applies every other rule to the other plans.
    """
    table = case.spec.sites
    if table is None or len(table.plans) != table.count:
        return
    run = during(case.spec, Phases.of(case.spec).all[0])
    whole = not any(mesh.batch_divides(replace(case, spec=run)))
    for number, (plan, one) in enumerate(zip(table.plans, table.each, strict=True)):
        cluster = one.cluster or case.spec.cluster
        if plan == case.plan and cluster == case.spec.cluster:
            continue
        fleet = run.fleet.model_copy(update={"nodes": 1})  # another site has other machines
        here = within(run.model_copy(update={"sites": table.model_copy(update={"site": number})}))
        changes = {"cluster": cluster, "plan": plan, "fleet": fleet, "train": here.train, "sites": None}
        for problem in _under(run, changes, f"sites.each.{number}.plan", remedies=case.remedies):
            if problem.key != "train.global_batch" or whole:  # a site's batch is not in the file, so no other batch of it helps
                yield problem
        if case.model is not None:
            yield from other_sets(case.spec, plan, f"sites.each.{number}.plan")
        beside = replace(case, spec=case.spec.model_copy(update={"plan": plan}))
        for problem in sites.sites_stay_together(beside):
            if problem.key.startswith("plan."):
                yield replace(problem, key=f"sites.each.{number}.{problem.key}")


def _under(run: RunSpec, changes: Mapping[str, Any], name: str, *, remedies: bool) -> Found:
    """Yield the errors that a run has under another plan but not under its own. `changes`: the other plan, which the run file
    calls `name`, and the values that belong to it."""
    for problem in check(run.model_copy(update=changes), files=False, remedies=remedies):
        if problem.severity == "error" and problem.key.partition(".")[0] == "plan":
            yield replace(problem, key=f"{name}{problem.key.removeprefix('plan')}")
        elif problem.severity == "error" and _depends_on_plans(problem.key) and problem.reason not in _reasons(run):
            yield replace(problem, reason=f"{problem.reason} in {name}")


def _depends_on_plans(key: str) -> bool:
    """Return True if another plan may make the value of this key, which is not in a plan's table, an error."""
    return key in SET_BY_PHASES or key.startswith("precision.")


def _reasons(run: RunSpec) -> set[str]:
    """Return the reasons of all problems of a run under its own plan."""
    fleet, sites = run.fleet.model_copy(update={"fallback": None}), run.sites
    alone = run.model_copy(update={"fleet": fleet, "sites": sites and sites.model_copy(update={"each": ()})})
    return {problem.reason for problem in check(alone, files=False, remedies=False)}


RULES: tuple[Rule, ...] = (
    Rule("name", name.name_is_a_folder),
    Rule("model", model.heads_make_up_the_width),
    Rule("model", model.heads_share_keys_evenly),
    Rule("model", model.sequences_fit_the_context),
    Rule("mesh", mesh.replicate_divides_data),
    Rule("mesh", mesh.ranks_match_the_plan),
    Rule("fleet", fleet.nodes_share_the_ranks),
    Rule("mesh", mesh.tensor_divides_the_model),
    Rule("mesh", mesh.kv_heads_meet_the_tensor_ranks),
    Rule("mesh", mesh.context_divides_the_sequence),
    Rule("mesh", mesh.experts_have_ranks),
    Rule("model", model.routing_is_learnt),
    Rule("fleet", fleet.fallback_is_the_same_run),
    Rule("fleet", fallback_can_be_run),
    Rule("mesh", mesh.batch_divides),
    Rule("pipeline", pipeline.every_stage_has_a_block),
    Rule("pipeline", pipeline.layers_fill_the_stages),
    Rule("pipeline", pipeline.schedule_is_there),
    Rule("pipeline", pipeline.schedule_can_be_built),
    Rule("pipeline", pipeline.zero_bubble_is_worth_its_memory),
    Rule("software", software.transfers_can_hide),
    Rule("software", software.compiler_keeps_collectives),
    Rule("software", software.compiler_keeps_roundings),
    Rule("software", software.torch_has_the_kernels),
    Rule("pipeline", pipeline.second_copies_are_worth_it),
    Rule("pipeline", pipeline.bubble_is_small),
    Rule("pipeline", pipeline.tied_weights_stay_together),
    Rule("retain", retain.recomputation_names_what_exists),
    Rule("retain", retain.activations_are_formed_again),
    Rule("retain", retain.latents_make_heads_again),
    Rule("retain", retain.parts_have_one_action),
    Rule("retain", retain.parts_can_be_compressed),
    Rule("retain", retain.compressed_tiles_lie_inside_shards),
    Rule("memory", memory.state_fits),
    Rule("memory", memory.hosts_hold_what_leaves_devices),
    Rule("memory", memory.optimizer_is_sharded),
    Rule("memory", memory.state_elsewhere_can_be_had),
    Rule("memory", memory.weights_elsewhere_are_gathered),
    Rule("memory", memory.vocabulary_is_cut),
    Rule("memory", memory.disk_takes_the_state),
    Rule("memory", memory.released_gradients_save_memory),
    Rule("memory", memory.released_gradients_are_updated_by_parts),
    Rule("memory", memory.segments_lie_in_a_stage),
    Rule("retain", retain.kept_tensors_can_leave),
    Rule("memory", memory.long_sequences_recompute),
    Rule("device", device.cluster_is_known),
    Rule("device", device.tensor_stays_on_fast_links),
    Rule("device", device.experts_stay_on_fast_links),
    Rule("device", device.device_suits),
    Rule("narrow", narrow.tiles_lie_inside_shards),
    Rule("narrow", narrow.tiles_lie_inside_sequences),
    Rule("narrow", narrow.maxima_can_be_shared),
    Rule("narrow", narrow.draws_know_their_numbers),
    Rule("products", products.scales_are_the_formats),
    Rule("narrow", narrow.histories_follow_tensors),
    Rule("narrow", narrow.blocks_become_wide),
    Rule("narrow", narrow.dispatch_has_the_experts_numbers),
    Rule("narrow", narrow.gradients_of_results_are_sent),
    Rule("narrow", narrow.kept_are_the_forwards_numbers),
    Rule("packed", packed.packed_tiles_lie_inside_shards),
    Rule("packed", packed.inputs_can_be_packed),
    Rule("narrow", narrow.gathers_have_the_products_numbers),
    Rule("products", products.experts_gradients_follow_the_plan),
    Rule("products", products.rotations_fit),
    Rule("narrow", narrow.something_is_narrow),
    Rule("products", products.patterns_match_layers),
    Rule("products", products.a_layer_stays_narrow),
    Rule("products", products.a_product_stays_narrow),
    Rule("products", products.formats_can_be_mixed),
    Rule("narrow", narrow.narrow_is_emulated),
    Rule("narrow", narrow.codes_can_be_multiplied),
    Rule("steps", steps.warmup_and_decay_fit),
    Rule("steps", steps.long_runs_save),
    Rule("stability", stability.answers_are_a_ladder),
    Rule("stability", stability.rewinds_have_copies),
    Rule("stability", stability.scales_are_powers_of_two),
    Rule("stability", stability.scale_is_used),
    Rule("optimizer", optimizer.groups_match),
    Rule("optimizer", optimizer.matrices_fit),
    Rule("optimizer", optimizer.clipping_makes_sense),
    Rule("optimizer", optimizer.rates_scale),
    Rule("own", own.own_parts_fit_the_plan),
    Rule("own", own.state_is_at_hand),
    Rule("own", own.callbacks_are_listed_once),
    Rule("moments", moments.blocks_lie_inside_shards),
    Rule("moments", moments.something_is_small),
    Rule("moments", moments.halves_can_be_had),
    Rule("moments", moments.gradients_in_bf16_are_of_bf16),
    Rule("sites", sites.merges_fit_the_round),
    Rule("sites", sites.fragments_have_parts),
    Rule("sites", sites.methods_are_whole),
    Rule("sites", sites.asynchronous_merges_need_no_site),
    Rule("sites", sites.gradients_can_be_exchanged),
    Rule("sites", sites.sites_stay_together),
    Rule("sites", sites.guards_repeat_no_exchange),
    Rule("sites", sites.addresses_are_each_sites),
    Rule("sites", sites.certificates_are_there),
    Rule("sites", sites.sites_are_numbered),
    Rule("sites", sites.each_site_has_a_table),
    Rule("sites", sites.names_tell_sites_apart),
    Rule("sites", sites.each_cluster_has_the_ranks),
    Rule("sites", each_site_can_train),
    Rule("sites", sites.faults_go_back_to_checkpoints),
    Rule("fleet", fleet.verification_has_a_replica),
    Rule("fleet", fleet.verification_repeats_bits),
    Rule("fleet", fleet.updates_can_be_repeated),
    Rule("data", data.data_is_prepared),
    Rule("data", data.data_is_whole),
    Rule("data", data.vocabulary_covers_the_tokens),
    Rule("data", data.weighted_domains_exist),
    Rule("data", data.weighted_domains_have_text),
    Rule("data", data.validation_has_text),
    Rule("software", software.sinks_are_there),
    Rule("software", software.alerts_can_be_sent),
    Rule("data", data.data_is_not_worn_out),
    Rule("fleet", fleet.disk_takes_copies),
    Rule("weights", weights.first_weights_fit),
    Rule("weights", weights.branch_fits),
)
"""All rules. Problems of one severity are listed in the order of this table."""
