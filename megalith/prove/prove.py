"""Proves that any combination of parallelisms trains like one process. Drawn runs, one after another on newly forked ranks, are compared
with the same model in plain PyTorch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megalith.prove.axes import ParityCase, reference_key
from megalith.prove.compare import Recording, Row
from megalith.prove.draw import draw
from megalith.prove.large import norm_of_large_tensor
from megalith.prove.one_process import reference
from megalith.prove.parity import record
from megalith.prove.sites import prove_sites
from megalith.prove.verdict import judge
from megalith.prove.worlds import run_ranks
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups

CPU = torch.device("cpu")
TIMEOUT = 600.0
"""Time limit for proving one combination, in seconds. On an idle machine a proof takes only a few seconds."""

FEW = 28
"""The first drawn combinations are the cheapest, with one rank. If fewer combinations than this number are requested, this many
are drawn, and those with several ranks are proven."""

Outcome = Literal["equal", "tie", "NOT equal", "failed"]


@dataclass(frozen=True)
class ParityResult:
    """Result of one combination. `tokens_tied`: the number of tokens sent to other experts because two experts had nearly equal
    scores. `error`: the reason why the ranks did not finish; in this case there are no rows."""

    draw: ParityCase
    rows: tuple[Row, ...]
    tokens_tied: int = 0
    error: str = ""

    @property
    def outcome(self) -> Outcome:
        """The outcome in one word. A tie proves nothing, so its outcome is neither "equal" nor "NOT equal"."""
        if self.error:
            return "failed"
        if self.tokens_tied:
            return "tie"
        return "equal" if all(row.equal for row in self.rows) else "NOT equal"

    @property
    def gaps(self) -> tuple[Row, ...]:
        """The quantities that exceed their limits."""
        return tuple(row for row in self.rows if not row.equal)


def prove(one: ParityCase, *, references: dict[Any, Recording]) -> ParityResult:
    """Train a combination on its ranks and compare it with one process. Runs on one process are taken from `references`; missing
    ones are computed and added there.

    From the first call on, this process computes on one thread (see `prove.worlds.run_ranks`).
    """
    torch.set_num_threads(1)
    try:
        if one.spec.sites is not None:
            verdict = prove_sites(one.spec, timeout=TIMEOUT)
        else:
            verdict = judge(recorded(one.spec), spec=one.spec, alone=lambda spec: _known(spec, references))
    except (RuntimeError, TimeoutError) as error:
        return ParityResult(one, (), error=str(error))
    return ParityResult(one, (*verdict.rows, norm_of_large_tensor(CPU)), verdict.tokens_tied)


def _known(spec: RunSpec, references: dict[Any, Recording]) -> Recording:
    key = reference_key(spec)
    if key not in references:
        references[key] = reference(spec, device=CPU)
    return references[key]


def recorded(spec: RunSpec) -> Recording:
    """Record a small run under its plan, on ranks forked from this process.

    Raises RuntimeError or TimeoutError if the ranks do not finish.
    """
    return run_ranks(_record, spec.plan.ranks, spec, timeout=TIMEOUT)[0]


def _record(rank: int, spec: RunSpec) -> Recording:
    return record(assemble(spec, groups=mesh_groups(spec, CPU), device=CPU))


def few(count: int, seed: int) -> list[ParityCase]:
    """Return the combinations to prove, drawn with `seed`. If `count` is small, only combinations with several ranks are
    returned."""
    return sorted(draw(max(count, FEW), seed), key=lambda one: one.ranks > 1)[-count:]


def prove_drawn(count: int, seed: int, *, starting: Callable[[ParityCase], None] = lambda one: None) -> Iterator[ParityResult]:
    """Prove `count` combinations drawn with `seed`. After each tie, the unused draw that is most similar is run, if there is one,
    so that `count` combinations give a proof. `starting` is called with each combination before it runs."""
    torch.set_num_threads(1)  # before the first reference: it would start threads that no fork survives
    references: dict[Any, Recording] = {}
    waiting = few(count, seed)
    used = {one.choices for one in waiting}
    others: list[ParityCase] | None = None
    while waiting:
        one = waiting.pop(0)
        starting(one)
        proof = prove(one, references=references)
        yield proof
        if proof.outcome == "tie":
            others = draw(count + 100, seed + 1) if others is None else others
            others = [other for other in others if other.choices not in used]
            if others:
                waiting.append(max(others, key=lambda other: len(other.pairs & one.pairs)))
                used.add(waiting[-1].choices)
