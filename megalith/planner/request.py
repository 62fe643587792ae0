"""Request for a plan, from a run file or from command-line options. All mistakes in a request are reported at once. No torch."""

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megalith.check import check
from megalith.check.own import load_admitted
from megalith.check.remedies import changed_by, rounding
from megalith.cost.software import OURS, SOFTWARE
from megalith.cost.workload import Narrow, computed
from megalith.planner import formats
from megalith.planner.candidates import splits
from megalith.planner.described import described, of_cluster
from megalith.planner.problems import REMEDIES, across_sites, plan_problems, problem
from megalith.spec import cluster as clusters
from megalith.spec.cluster import ClusterSpec
from megalith.spec.files import ResolvedRun
from megalith.spec.model import ModelSpec
from megalith.spec.numbers import PrecisionSpec, is_narrow, packs
from megalith.spec.phases import Phase, Phases, during
from megalith.spec.plan import Plan
from megalith.spec.presets import meant, presets
from megalith.spec.problem import Problem, SpecErrors, near
from megalith.spec.quantity import Amount, quantity
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, own_batch, within
from megalith.spec.sizes import active_parameters

DATA = "data/tokens"
"""Data path of a written run file, if none was given."""

OPTIMAL = 20
"""Tokens a parameter of a compute-optimal training (Hoffmann et al. 2022, arXiv:2203.15556, table 3)."""

LENGTH, BATCH_TOKENS = 8192, 4 * 2**20
"""Default limit of tokens a sequence, and default tokens a step, as in most large trainings."""

SIZE = re.compile(r"[\d.]+[bBmMtT]")
"""A number of parameters such as 7b."""

STEPS = 10_000
"""Default number of steps in a written run file."""


@dataclass(frozen=True)
class PlanRequest:
    """The options of the command line; None for an option that was not given."""

    path: Path | None = None
    model: str | None = None
    cluster: str | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    global_batch_tokens: str | None = None
    tokens: str | None = None
    compute_optimal: bool = False
    """Train on the number of tokens that Chinchilla's rule gives."""
    format: str | None = None
    forward_only: bool = False
    """Predict the prefill of long prompts instead of training."""
    offload: bool = False
    """Also search layouts with some of the optimizer's state or of the activations in host memory or on disk."""
    small: bool = False
    """Keep moments in 8 bits, and also try other forms of the state that round."""
    software: str = OURS
    """The software whose steps are predicted: a name in `cost.software`."""
    overrides: tuple[str, ...] = ()
    out: bool = False
    """True if the best plan will be written as a run."""


@dataclass(frozen=True)
class ResolvedRequest:
    """A complete and valid request. `run` has all values except the plan to search for."""

    run: RunSpec
    model: ModelSpec
    cluster: ClusterSpec
    format: str
    tokens: float | None
    """Tokens of the whole training; None if unknown."""
    notes: tuple[str, ...]
    """Notes on values that were rounded or assumed."""
    resolved: ResolvedRun | None
    forward_only: bool = False
    offload: bool = False
    small: bool = False
    software: str = OURS
    factor: float = 1.0
    """Factor by which predicted times are multiplied because of the user's measurements."""
    whole: RunSpec | None = None
    """The run with all its phases, or None. If `whole` is set, `run` is limited to the phase that reads the most tokens."""
    sites: SitesSpec | None = None
    """The table `[sites]` of the run file; `run` is then the run of one site."""
    chosen: bool = False
    """True if the planner chooses `[precision]` for a narrow format; layers that the format makes slower then become wide."""

    @property
    def ours(self) -> bool:
        """True if the plan is for Megalith's trainer."""
        return self.software == OURS

    @property
    def compiles(self) -> bool:
        """True if blocks are compiled: as the run file states, or, without a run file, on GPUs under Megalith's trainer. Blocks are never
        compiled if the trainer emulates a narrow format, or keeps inputs of bf16 products in 8 bits."""
        if self.ours and (formats.is_rehearsed(self.run, self.cluster) or packs(self.run.precision, self.run.train.precision)):
            return False  # a compiler may leave out roundings, and decides what is kept
        if self.resolved is not None:
            return self.run.plan.compile
        return self.ours and self.cluster.accelerator.vendor in ("NVIDIA", "AMD")

    @property
    def computes(self) -> tuple[str, Narrow | None]:
        """The main number format, and the narrow precision of Megalith's trainer with its settings; None: no narrow precision."""
        if not self.ours or self.forward_only:
            return self.format, None
        return computed(self.run.train.precision, self.run.precision)

    @property
    def own(self) -> Plan | None:
        """The run file's plan, if it uses all devices of the cluster."""
        return self.run.plan if self.resolved is not None and self.run.plan.ranks == self.cluster.count else None

    def changed(self, *, small: bool = False, offload: bool = False, kept: bool = False) -> "ResolvedRequest":
        """Return the request with 8-bit moments, and other forms of the state that round (`small`), with inputs of products kept in 8 bits
        (`kept`), and with state or activations in host memory or on disk (`offload`)."""
        values = (REMEDIES["small"].values if small else {}) | (REMEDIES["kept"].values if kept else {})
        return replace(self.with_values(values), offload=self.offload or offload, small=self.small or small)

    def with_values(self, values: dict[str, Any]) -> "ResolvedRequest":
        """Return the request with other values of its run."""
        return replace(self, run=changed_by(self.run, values), whole=self.whole and changed_by(self.whole, values))

    def forms(self) -> "list[tuple[dict[str, Any], ResolvedRequest]]":
        """Return each other form of master weights and gradients that the request allows, as values and as the changed request, the one
        that changes least first. Values that round need `small`. Values of the run file, and those of sites, stay."""
        if not self.ours or self.forward_only or self.sites is not None:
            return []
        given = self.resolved.provenance if self.resolved is not None else {}
        free = (each for each in formats.forms_of_state(self.run) if all(given.get(key, "default") == "default" for key in each))
        return [(values, self.with_values(values)) for values in free if self.small or not rounding(values)]

    def gains(self, plan: Plan) -> formats.Gains | None:
        """Return the time that 8-bit products save in each layer under a plan; None if the trainer does not use 8-bit
        products."""
        run = self.run.model_copy(update={"plan": plan})
        codes = self.ours and not self.forward_only and formats.multiplies_in_8_bits(run, self.cluster)
        return formats.gains(run, self.cluster) if codes else None

    def widened(self, plan: Plan) -> "ResolvedRequest | None":
        """Return the request with further wide layers, which the chosen recipe makes slower under a plan; None if there are no further
        such layers."""
        more = formats.losing(self.run.model_copy(update={"plan": plan}), self.cluster) if self.chosen else ()
        if not more:
            return None
        choices = self.run.precision.model_copy(update={"wide": (*self.run.precision.wide, *more)})
        changed = {"precision": choices}
        whole = self.whole and self.whole.model_copy(update=changed)
        notes = (
            *self.notes,
            f"layers also stay wide if narrow products would make them slower under the best layout: {', '.join(more)}",
        )
        return replace(self, run=self.run.model_copy(update=changed), whole=whole, notes=notes)

    def is_valid(self, plan: Plan) -> bool:
        """True if `megalith check` would accept the plan; only problems that concern the plan count."""
        return not self.problems(plan)

    def problems(self, plan: Plan) -> list[Problem]:
        """Return the problems for which `megalith check` would refuse the plan."""
        denied = plan_problems(self.whole or self.run, plan)
        # what `plan.zero` is denied for is the state of training on the device, which a prefill has not
        passed = {"plan.zero"} if self.forward_only else set[str]()
        return [problem for problem in denied if problem.key not in passed]


def resolve(plan_request: PlanRequest) -> ResolvedRequest:
    """Resolve a request. Raises SpecErrors with all problems of the request."""
    problems: list[Problem] = []
    resolved = _loaded(plan_request, problems)
    spec = resolved.spec if resolved else None
    whole = spec if spec is not None and len(Phases.of(spec).all) > 1 else None
    if whole is not None:
        spec = during(whole, max(Phases.of(whole).spans(whole.train.steps), key=_tokens_of)[0])
        if plan_request.seq_len or plan_request.global_batch or plan_request.global_batch_tokens:
            whole = None  # the request is another one than the file's
    phased = whole
    if (sites := spec.sites if spec is not None else None) is not None and spec is not None:
        batch_ = plan_request.global_batch or plan_request.global_batch_tokens
        problems += across_sites(whole or spec, out=plan_request.out, cluster=plan_request.cluster, batch=batch_)
        spec, whole = within(spec), None
    model, taken = _model(plan_request, spec, problems)
    cluster_name, cluster = _cluster(plan_request, spec, problems)
    ours = plan_request.software == OURS and not plan_request.forward_only
    format_ = formats.format_of(plan_request.format, spec and spec.train.precision, cluster, problems, ours=ours)
    if plan_request.out and plan_request.software != OURS:
        reason = "this software is not Megalith, but --out writes a run file for Megalith, whose memory and time differ"
        problems.append(problem("--software", plan_request.software, reason, "Leave out --out or --software."))
    if plan_request.software not in SOFTWARE:
        problems.append(problem("--software", plan_request.software, "is not known", f"Known: {', '.join(SOFTWARE)}."))
    seq_len, noted = _length(plan_request, spec, model)
    batch, notes = _batch(plan_request, spec, seq_len, problems)
    notes = (*taken, *noted, *notes)
    if plan_request.out and (own := of_cluster(plan_request.overrides)):
        notes = (*notes, f"--out writes the cluster's name but not {', '.join(own)}; a cluster file can contain these values")
    if sites is not None:
        others = "; for the phase with the most tokens: whether the plan fits the others was not checked" if phased else ""
        notes = (*notes, f"planned for one of {sites.count} sites, between merges{others}")
    tokens = None if plan_request.forward_only else _tokens(plan_request, spec, phased, problems)
    if plan_request.forward_only:
        problems += _not_of_prefill(plan_request)
    if model is not None and seq_len is not None:
        problems += _sizes_wrong(model, seq_len)
        if cluster is not None and batch is not None and not any(problem.key == "train.seq_len" for problem in problems):
            problems += _not_dealt(model.build(), cluster, seq_len, batch, said=_batch_key(plan_request))
    if problems:
        raise SpecErrors(problems)
    assert model and cluster and seq_len and batch and format_
    built = model.build()
    if plan_request.compute_optimal:
        tokens, note = compute_optimal(built)
        notes = (*notes, note)
    trained = format_ if ours or not is_narrow(format_) else "bf16"
    run = _run(spec, model, cluster_name, seq_len, batch, trained, tokens)
    chosen = (
        ours and is_narrow(trained) and (spec is None or (spec.train.precision != trained and spec.precision == PrecisionSpec()))
    )
    run = run.model_copy(update={"precision": formats.recipe(run, cluster)}) if chosen else run
    if ours:
        if unfit := formats.precision_problems(run):
            raise SpecErrors(unfit)
        notes = (*notes, *formats.notes_on(run, cluster, chosen=chosen))
    if whole is not None:
        phases = Phases.of(whole)
        length = {} if tokens is None else {"steps": phases.steps_to(Amount(round(tokens), "tokens"))}
        train = whole.train.model_copy(update=length | {"precision": trained})
        whole = whole.model_copy(update={"model": model, "cluster": cluster_name, "train": train, "precision": run.precision})
        notes = (*notes, f"searched for the phase with the most tokens; the plan fits in all {len(phases.all)} phases")
    found = ResolvedRequest(
        run, built, cluster, format_, tokens, notes, resolved, plan_request.forward_only, plan_request.offload,
        software=plan_request.software, whole=whole, sites=sites, chosen=chosen,
    )  # fmt: skip
    return found.changed(small=True) if plan_request.small else found


def _tokens_of(span: tuple[Phase, int]) -> int:
    """Return the number of tokens that a phase reads in its number of steps."""
    phase, steps = span
    return steps * phase.global_batch * phase.seq_len


def compute_optimal(model: ModelSpec) -> tuple[float, str]:
    """Return the compute-optimal tokens for this model (Hoffmann et al. 2022, arXiv:2203.15556: about 20 a parameter), and
    the calculation as text. Only active experts count."""
    parameters = active_parameters(model)
    tokens = float(f"{OPTIMAL * parameters:.3g}")
    return tokens, (
        f"--compute-optimal: {OPTIMAL} tokens for each of {parameters / 1e9:,.4g}B active parameters = {tokens / 1e12:,.3g}T "
        f"tokens; 6 x {parameters / 1e9:,.4g}B x {tokens / 1e12:,.3g}T = {6 * parameters * tokens:.2g} FLOP"
    )


def _not_of_prefill(plan_request: PlanRequest) -> list[Problem]:
    """Return a problem for each option that only applies to training."""
    given = {
        "--tokens": plan_request.tokens, "--compute-optimal": plan_request.compute_optimal or None, "--out": plan_request.out or None,
    }  # fmt: skip
    reason = "this option applies to training, but --forward-only predicts a prefill"
    return [problem(name, value, reason, f"Leave out {name} or --forward-only.") for name, value in given.items() if value]


def _loaded(plan_request: PlanRequest, problems: list[Problem]) -> ResolvedRun | None:
    overrides = [text for text in plan_request.overrides if text not in of_cluster(plan_request.overrides)]
    if plan_request.path is None:
        if overrides:
            way_out = "Give a RUN.toml, or use --model, --cluster, --seq-len and --global-batch."
            problems.append(problem("--set", overrides[0], "needs a run file, but none was given", way_out))
        return None
    return load_admitted(plan_request.path, overrides, problems)


def _model(plan_request: PlanRequest, spec: RunSpec | None, problems: list[Problem]) -> tuple[Any, tuple[str, ...]]:
    """Return two values: the model's flat spec (None if there is none), and notes: one if the given size fits several models."""
    if plan_request.model is None:
        if spec is None and plan_request.path is None:
            problems.append(
                problem("--model", None, "is missing", "Name a preset, such as --model llama3.1-8b, or give a RUN.toml.")
            )
        return spec.model if spec else None, ()
    try:
        found = named_model(plan_request.model)
    except SpecErrors as errors:
        problems += errors.problems
        return None, ()
    others = [name for name in meant(plan_request.model) if name != found.name]
    if plan_request.model in presets() or not others:
        return found, ()
    return found, (f"--model {plan_request.model}: means {found.name}; other models of this size: {', '.join(others)}",)


def named_model(name: str) -> Any:
    """Return the flat spec of the preset with this name, or of the only preset that a shorter name such as "405b" can mean.
    Raises SpecErrors.

    A size alone, such as "7b", means the newest Llama of this size.
    """
    known = presets()
    found = [name] if name in known else meant(name)
    if len(found) > 1 and SIZE.fullmatch(name):
        found = [one for one in found if one.startswith("llama")][-1:] or found
    if len(found) == 1:
        return known[found[0]].build()
    if found:
        reason = f"may mean {', '.join(found[:-1])} or {found[-1]}"
        raise SpecErrors([problem("--model", name, reason, f"Name one of these models, such as --model {found[-1]}.")])
    nearest = near(name, known)
    way_out = f"{f'Did you mean {nearest!r}? ' if nearest else ''}`megalith models` lists all models."
    raise SpecErrors([problem("--model", name, "no preset has this name", way_out)])


def _cluster(plan_request: PlanRequest, spec: RunSpec | None, problems: list[Problem]) -> tuple[str, ClusterSpec | None]:
    name = plan_request.cluster
    if name is None and spec is not None and spec.cluster != "local":
        name = spec.cluster if clusters.counted(spec.cluster) else f"{spec.cluster}:{spec.plan.ranks}"
    if name is None:
        if spec is not None or plan_request.path is None:
            problems.append(problem("--cluster", None, "is missing", "Name the devices to plan for, such as --cluster h100:64."))
        return "", None
    return name, described(name, plan_request.overrides, problems)


def _length(plan_request: PlanRequest, spec: RunSpec | None, model: Any) -> tuple[int | None, tuple[str, ...]]:
    """Return the tokens of a sequence. If --seq-len was not given, use the model's context, but at most LENGTH, with a note."""
    length = plan_request.seq_len or (spec.train.seq_len if spec else None)
    if length is not None or model is None or plan_request.path is not None:
        return length, ()
    length = min(model.context, LENGTH)
    return length, (f"--seq-len was not given: planned with {length:,} tokens of the model's context of {model.context:,}",)


def _batch_key(plan_request: PlanRequest) -> str:
    return "--global-batch-tokens" if plan_request.global_batch_tokens else "--global-batch"


def _batch(
    plan_request: PlanRequest, spec: RunSpec | None, seq_len: int | None, problems: list[Problem]
) -> tuple[int | None, tuple[str, ...]]:
    """Return the sequences of a step, and notes on rounding."""
    text = plan_request.global_batch_tokens
    if text and plan_request.global_batch:
        way_out = "Remove one of these two options."
        problems.append(
            problem("--global-batch-tokens", text, f"sets the batch, as --global-batch {plan_request.global_batch} does", way_out)
        )
        return None, ()
    if not text:
        batch = plan_request.global_batch or (1 if plan_request.forward_only else spec.train.global_batch if spec else None)
        if batch is not None or seq_len is None or plan_request.path is not None:
            return batch, ()
        batch = max(1, BATCH_TOKENS // seq_len)
        return batch, (
            f"--global-batch was not given: planned with {batch:,} sequences, about {BATCH_TOKENS / 2**20:.0f}M tokens a step",
        )
    wanted = quantity(text, thousand=1024)
    if wanted is None:
        way_out = "Write 16M (16 x 2^20, the usual count for batches), or 16e6."
        problems.append(problem("--global-batch-tokens", text, "is not a number of tokens", way_out))
        return None, ()
    if seq_len is None:
        return None, ()
    batch = max(1, round(wanted / seq_len))
    how = "" if batch * seq_len == wanted else "rounded to whole sequences: "
    return batch, (
        f"--global-batch-tokens {text} = {wanted:,.0f} tokens, {how}{batch:,} of {seq_len:,} = {batch * seq_len:,} tokens",
    )


def _tokens(plan_request: PlanRequest, spec: RunSpec | None, whole: RunSpec | None, problems: list[Problem]) -> float | None:
    if plan_request.tokens is not None and plan_request.compute_optimal:
        way_out = "Remove one of these two options."
        problems.append(
            problem("--tokens", plan_request.tokens, "conflicts with --compute-optimal: both set the length of training", way_out)
        )
    if plan_request.tokens is None:
        if spec is None:
            return None
        if whole is not None:
            phases = Phases.of(whole)
            return phases.tokens(phases.after(0, whole.train.steps)) * own_batch(whole) / whole.train.global_batch
        batch, length = plan_request.global_batch or spec.train.global_batch, plan_request.seq_len or spec.train.seq_len
        return float(spec.train.steps * batch * length)
    tokens = quantity(plan_request.tokens)
    if tokens is None:
        problems.append(problem("--tokens", plan_request.tokens, "is not a number of tokens", "Write 15T, 300B or 2e9."))
    return tokens


def _sizes_wrong(model: Any, seq_len: int) -> list[Problem]:
    """Return the problems that the model, or sequences of this length, have under every plan."""
    run = _run(None, model, "local", seq_len, 1, "bf16", None)
    found = [
        one for one in check(run, files=False) if one.severity == "error" and one.key.startswith(("model.", "train.seq_len"))
    ]
    if seq_len % 2:
        way_out = f"Use {' or '.join(str(n) for n in (seq_len + 1, seq_len - 1) if n)}."
        found.append(problem("train.seq_len", seq_len, "is odd, but layouts that split sequences need an even length", way_out))
    return found


def _not_dealt(model: ModelSpec, cluster: ClusterSpec, seq_len: int, batch: int, *, said: str) -> list[Problem]:
    """Return the problem of a batch that no layout divides evenly."""
    sizes = {cluster.count // prod(split): split for split in splits(model, cluster, seq_len)}
    if any(batch % data == 0 for data in sizes):
        return []
    least = min(sizes)
    tensor, context, pipeline = sizes[least]
    most = " x ".join(f"{name} {n}" for name, n in (("tensor", tensor), ("context", context), ("pipeline", pipeline)) if n > 1)
    near_ones = " or ".join(str(n) for n in (batch // least * least, -(-batch // least) * least) if n)
    reason = (
        f"no layout of {cluster.count:,} devices distributes {batch:,} sequences evenly: even with the largest split"
        f"{f' ({most})' if most else ''} there are {least:,} data ranks"
    )
    key = "--global-batch"
    note = f" ({said} was rounded to {batch})" if said != key else ""
    return [problem(key, batch, reason + note, f"Use {near_ones} sequences; powers of two allow the most layouts.")]


def _run(
    spec: RunSpec | None, model: Any, cluster: str, seq_len: int, batch: int, precision: str, tokens: float | None
) -> RunSpec:
    """Return the run to plan for: the run file's run, or a run of the given values and defaults."""
    steps = max(1, round(tokens / (batch * seq_len))) if tokens else STEPS
    if spec is not None:
        train = spec.train.model_copy(update={"seq_len": seq_len, "global_batch": batch, "precision": precision, "steps": steps})
        return spec.model_copy(update={"model": model, "cluster": cluster, "train": train})
    return RunSpec.model_validate(
        {
            "name": model.name,
            "cluster": cluster,
            "model": model.model_dump(),
            "data": {"path": DATA},
            "train": {"steps": steps, "seq_len": seq_len, "global_batch": batch, "precision": precision},
            "optimizer": {"warmup": min(2000, steps // 20)},
            "checkpoint": {"every": min(500, max(1, steps // 20))},
        }
    )
