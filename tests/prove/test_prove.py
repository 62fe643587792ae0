"""The loop that proves combinations: the criterion for equality, and the handling of ties."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalith.parallel import gradients
from megalith.prove import prove as module
from megalith.prove.axes import ParityCase, axes_with_precisions, reference_key
from megalith.prove.compare import Recording, Row, compare
from megalith.prove.draw import draw
from megalith.prove.parity import reference, shrink
from megalith.prove.prove import CPU, FEW, ParityResult, few, prove, prove_drawn
from tests.specs import tiny_run

pytestmark = pytest.mark.slow

torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent has used more than one thread
EQUAL, GAP = Row("loss", 0.0, 1e-5, "step 1"), Row("loss", 1.0, 1e-5, "step 1")


@pytest.fixture(scope="module")
def two_ranks() -> ParityCase:
    return next(
        one for one in draw(FEW, 0) if one.spec.plan.ranks == 2 and one.spec.train.precision == "fp32" and not one.spec.sites
    )


def test_a_combination_is_equal_and_its_reference_is_kept(two_ranks: ParityCase) -> None:
    references: dict[Any, Recording] = {}
    proof = prove(two_ranks, references=references)
    assert proof.outcome == "equal", proof
    assert len(proof.rows) >= 4
    (kept,) = references.values()
    kept.losses[0] += 1e-3
    again = prove(two_ranks, references=references)
    assert again.outcome == "NOT equal"
    assert [row.quantity for row in again.gaps] == ["loss, |difference|"]


def test_a_norm_that_errs_only_in_large_tensors_is_found(two_ranks: ParityCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: squares of a whole tensor are added up in fp32. The small models of the comparison have no tensor large enough for it."""
    monkeypatch.setattr(gradients, "LARGE", 1 << 40)
    assert [row.quantity for row in prove(two_ranks, references={}).gaps] == ["gradient norm of a large tensor, relative"]


def test_a_combination_in_bf16_is_measured_from_fp32() -> None:
    """Such a run has two references. A model that lacks numbers below bf16's resolution does not equal the fp32 model."""
    one = next(one for one in draw(FEW, 0, axes_with_precisions("bf16")) if one.spec.plan.ranks > 1 and not one.spec.sites)
    references: dict[Any, Recording] = {}
    assert prove(one, references=references).outcome == "equal"
    exact, alone = (next(r for key, r in references.items() if key[1] == precision) for precision in ("fp32", "bf16"))
    assert len(references) == 2
    assert not any(row.equal for row in compare(exact, alone, spec=one.spec) if row.quantity.startswith("gradients"))


def test_scales_over_the_tokens_of_a_microbatch_have_a_reference_for_each_size_of_it() -> None:
    """Two data ranks with one sequence each have two maxima, where one rank with two sequences has one."""
    plans = ({"data": 2, "microbatch": 1}, {"microbatch": 2})
    small = {"train": {"global_batch": 8, "precision": "fp8"}, "precision": {"granularity": "row"}}
    apart, together = (shrink(tiny_run(plan=plan, **small), steps=1) for plan in plans)
    assert apart.plan.set_sequences == together.plan.set_sequences
    assert reference(apart, device=CPU).maxima != reference(together, device=CPU).maxima
    assert reference_key(apart) != reference_key(together)


def test_ranks_that_fail_are_a_failure_of_their_case_only(two_ranks: ParityCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rank: int, spec: Any) -> None:
        raise ArithmeticError(f"rank {rank} broke")

    monkeypatch.setattr(module, "_record", broken)
    proof = prove(two_ranks, references={})
    assert proof.outcome == "failed"
    assert "broke" in proof.error


@pytest.mark.parametrize(
    ("tied", "row", "outcome"), [(0, EQUAL, "equal"), (0, GAP, "NOT equal"), (2, EQUAL, "tie"), (2, GAP, "tie")]
)
def test_a_tie_is_neither_equal_nor_a_gap(two_ranks: ParityCase, tied: int, row: Row, outcome: str) -> None:
    assert ParityResult(two_ranks, (row,), tied).outcome == outcome


def test_another_combination_is_drawn_in_place_of_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ParityCase] = []

    def tied_at_first(one: ParityCase, *, references: Any) -> ParityResult:
        return ParityResult(one, (EQUAL,), int(len(seen) <= 2))

    monkeypatch.setattr(module, "prove", tied_at_first)
    proofs = list(prove_drawn(4, 0, starting=seen.append))
    assert [proof.outcome for proof in proofs] == ["tie", "tie", "equal", "equal", "equal", "equal"]
    assert len({proof.draw.choices for proof in proofs}) == 6
    assert [proof.draw for proof in proofs] == seen


def test_only_ties_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = draw(FEW + 3, 0)
    monkeypatch.setattr(module, "draw", lambda count, seed: pool[:FEW] if seed == 0 else list(pool))
    monkeypatch.setattr(module, "prove", lambda one, references: ParityResult(one, (EQUAL,), 1))
    assert len(list(prove_drawn(FEW, 0))) == FEW + 3


def test_few_draws_are_not_those_of_one_rank() -> None:
    assert all(one.spec.plan.ranks > 1 for seed in range(3) for one in few(3, seed))


def test_a_failed_case_has_no_rows_to_be_equal(two_ranks: ParityCase) -> None:
    assert replace(ParityResult(two_ranks, ()), error="died").outcome == "failed"


def test_a_bias_whose_gradient_cancels_out_is_compared_by_its_gradient_only() -> None:
    """A bias of keys shifts all scores of a query alike, so its gradient is a rounding error. Adafactor makes a whole update of it."""
    spec = shrink(tiny_run(plan={"tensor": 2}, model={"preset": "bloom-560m"}, optimizer={"kind": "adafactor"}), steps=2)
    references: dict[Any, Recording] = {}
    proof = prove(ParityCase((), spec), references=references)
    assert proof.outcome == "equal", proof
    (kept,) = references.values()
    keys, queries = (next(name for name in kept.weights if name.endswith(f"attention.{one}.bias")) for one in "kq")
    for name, gaps in ((keys, 0), (queries, 1)):
        moved = replace(kept, weights=kept.weights | {name: kept.weights[name] + 1e-4})
        assert sum(not row.equal for row in compare(kept, moved, spec=spec)) == gaps
        other = [one | {name: one[name] + 1e-2} for one in kept.gradients]
        assert any(not row.equal for row in compare(kept, replace(kept, gradients=other), spec=spec))
