"""Rules about prepared data: the data exists, is complete, and suffices for the run; its vocabulary and domains fit the run."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from megalith import disk
from megalith.check.case import Case, Found, advice, error, next_multiple
from megalith.data.errors import DataError
from megalith.data.manifest import Domain, check_copies, check_sizes, check_tokenizer, read_manifest
from megalith.spec.base import AbsentError
from megalith.spec.phases import Phase, Phases
from megalith.spec.problem import near
from megalith.spec.quantity import Amount
from megalith.spec.toml import key

NAMED = 5
"""Largest number of a folder's damaged files that are named one by one."""


def data_is_prepared(case: Case) -> Found:
    """The data folder exists and holds a manifest."""
    if not case.files or case.manifest is not None:
        return
    path = Path(case.spec.data.path)
    way_out = f"Make it with: megalith data prepare SOURCE... --tokenizer TOKENIZER --out {path}"
    if not disk.is_folder(path):
        absolute = f" (looked for {path.absolute()}; relative paths start at the current directory)"
        yield error("data.path", str(path), f"no such folder{absolute}", way_out)
        return
    try:
        read_manifest(path)
    except DataError as fault:
        yield error("data.path", str(path), fault.parts[0][0], way_out)
    except OSError as fault:
        yield error(
            "data.path", str(path), f"its manifest.json cannot be read: {fault}", "Give a folder with a readable manifest.json."
        )


def data_is_whole(case: Case) -> Found:
    """The folder or a copy has all shards at full length and the tokenizer that made them; every copy has the same data."""
    if not case.files:
        return
    path, copies, manifest = Path(case.spec.data.path), [Path(copy) for copy in case.spec.data.copies], case.manifest
    looks = [("data.copies", partial(check_copies, path, manifest, copies))]
    if manifest:
        looks += [
            ("data.path", partial(check_sizes, path, manifest, copies=copies)),
            ("data.path", partial(check_tokenizer, path, manifest)),
        ]
    for name, look in looks:
        try:
            look()
        except DataError as fault:
            value = getattr(case.spec.data, name.removeprefix("data."))
            for reason, way_out in fault.parts[:NAMED]:
                yield error(name, value, reason, way_out)
            if len(fault.parts) > NAMED:
                yield error(
                    name,
                    value,
                    f"{len(fault.parts) - NAMED} more files of the folder are damaged too",
                    "Repair each of these damaged files as the messages about the other files tell.",
                )


def vocabulary_covers_the_tokens(case: Case) -> Found:
    """The embedding has a row for every token id."""
    if case.manifest is None:
        return
    tokens, vocab = case.manifest.tokenizer.vocab_size, case.spec.model.vocab
    if tokens > vocab:
        reason = f"is smaller than the data's vocabulary of {tokens} tokens"
        unit = 1
        with suppress(AbsentError):  # a plan with a faulty value does not keep the vocabulary from being too small
            unit = case.plan.tensor * max(1, case.plan.dp_shard)  # dp_shard is 0 if the plan asks for more copies than ranks
        yield error("model.vocab", vocab, reason, f"Use {next_multiple(tokens, unit)}, or data made with a smaller tokenizer.")


def weighted_domains_exist(case: Case) -> Found:
    """A mixture only names domains of the data, and at least one domain has a share above 0."""
    weights = case.spec.data.weights
    if weights is None:
        return
    if not any(weights.values()):
        yield error("data.weights", weights, "gives no domain a share", "Give a domain a weight above 0, or leave weights out.")
    if case.manifest is None:
        return
    domains = case.manifest.domains
    for name in weights:
        if name not in domains:
            nearest = near(name, domains)
            way_out = f"{f'Did you mean {nearest}? ' if nearest else ''}The data has: {', '.join(domains)}."
            yield error(f"data.weights.{key(name)}", weights[name], "the data has no such domain", way_out)
    for name in domains:
        if name not in weights:
            reason = "the data has this domain, but the mixture gives the domain no share"
            yield error(f"data.weights.{key(name)}", None, reason, f"Set a share; {key(name)} = 0 leaves the domain out.")


def weighted_domains_have_text(case: Case) -> Found:
    """Each domain of the mixture has training text: a sample needs a token and the token after it."""
    weights = case.spec.data.weights
    for name, domain in _read_domains(case).items():
        if domain.train.tokens < 2 and _training_tokens(case):  # else no domain has any text, which another rule reports
            reason = f"the data has {domain.train.tokens} training tokens of this domain"
            share = None if weights is None else weights[name]
            yield error(
                f"data.weights.{key(name)}",
                share,
                reason,
                "Set the domain's share to 0, and divide its share among the other domains.",
            )


def validation_has_text(case: Case) -> Found:
    """Validation needs a held-out token and the token after it. It reads all domains, also those without a share of the training text."""
    every, manifest, length = case.spec.validation.every, case.manifest, case.spec.train.seq_len
    if not every or manifest is None:
        return
    held = [domain.validation.tokens for domain in manifest.domains.values()]
    reason, way_out = (
        f"the domains hold out {sum(held)} tokens",
        "Prepare the data with a larger held-out share, or use every = 0.",
    )
    if max(held, default=0) < 2:
        yield error("validation.every", every, f"{reason}, but validation needs at least two in one domain", way_out)
    elif sum(held) < length:
        reason += f", fewer than one sequence of {length} tokens, so the validation loss is measured on few tokens"
        yield advice("validation.every", every, reason, way_out)


def data_is_not_worn_out(case: Case) -> Found:
    """Up to four passes over the data are nearly as good as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""
    train, phases = case.spec.train, Phases.of(case.spec)
    read = {name: each.train.tokens for phase in phases.all for name, each in _read_domains(case, phase).items()}
    available = sum(read.values())
    if case.manifest is not None and available == 0:
        yield error(
            "data.path",
            case.spec.data.path,
            "holds no training tokens in the domains that the run reads",
            "Prepare the data again, from sources with text.",
        )
    elif available and (wanted := phases.tokens(phases.after(0, train.steps))) > 4 * available:
        reason = f"reads {wanted:,} tokens, {wanted / available:.1f} times the data's {available:,}; after 4 passes little more is learnt"
        way_out = f"Use steps <= {max(1, phases.steps_to(Amount(4 * available + 1, 'tokens')) - 1)}, or prepare more data."
        yield advice("train.steps", train.steps, reason, way_out)


def _training_tokens(case: Case) -> int:
    """Training tokens of the domains that the run reads."""
    return sum(domain.train.tokens for domain in _read_domains(case).values())


def _read_domains(case: Case, phase: Phase | None = None) -> dict[str, Domain]:
    """The domains that the run reads in `phase`, or, without `phase`, at the run's beginning."""
    weights = case.spec.data.weights if phase is None else phase.weights
    domains = case.manifest.domains if case.manifest else {}
    return {name: domain for name, domain in domains.items() if weights is None or weights.get(name)}
