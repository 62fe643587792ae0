"""The critical batch size from the losses of branches."""

import random

import pytest

from megalith.planner.batch import judge, rate_factor, trials
from megalith.report import advice as drawn
from megalith.spec.phases import Phases
from tests.specs import tiny_run

RUN = tiny_run(
    train={"steps": 100, "global_batch": 4, "batch_ramp": [{"begin": 40, "global_batch": 8}, {"begin": 400, "global_batch": 16}]},
    data={"path": "data", "phases": [{"begin": 80, "seq_len": 16}]},
    optimizer={"warmup": 0, "lr": 1e-3, "schedule": "cosine"},
)


def _trials(**changes):
    asked = {
        "checkpoint": "c",
        "updates": 20,
        "samples": 120,
        "steps": 8,
        "factors": [0.5, 1.0, 2.0, 4.0],
        "replicas": 2,
        "scaling": "root",
    }
    return list(trials(RUN, **asked | changes))  # type: ignore[arg-type]


def test_all_branches_of_a_replica_read_the_same_samples_in_one_shape():
    found = _trials()
    assert len({trial.name for trial in found}) == len(found) == 8
    for trial in found:
        spec, branch = trial.spec, trial.spec.branch
        assert branch is not None
        phases, begins = Phases.of(spec), 120 + 64 * trial.replica
        assert branch.samples + branch.skip == begins and branch.steps == 100
        updates = spec.train.steps - 20
        assert phases.after(begins, updates) == begins + 64, "as many samples, and tokens"
        assert phases.at(begins) is phases.all[-1]
        assert (phases.all[-1].seq_len, phases.all[-1].global_batch) == (16, 8 * trial.factor)
        assert [one.values for one in phases.begun(120)] == [one.values for one in Phases.of(RUN).begun(120)]
        assert spec.optimizer.lr == pytest.approx(1e-3 * trial.factor**0.5)


def test_the_steps_that_a_refusal_names_are_accepted():
    factors = [1.0, 1.5, 2.0]
    with pytest.raises(ValueError, match=r"or --steps \d+\.$") as refused:
        _trials(steps=5, factors=factors)
    _trials(steps=int(str(refused.value).split()[-1].rstrip(".")), factors=factors)


@pytest.mark.parametrize("changes", [{"factors": [1.0, 0.3]}, {"steps": 6, "factors": [1.0, 4.0]}])
def test_a_batch_that_does_not_divide_the_samples_is_refused_with_a_way_out(changes):
    with pytest.raises(ValueError, match=r"does not divide the .* samples of a branch"):
        _trials(**changes)


def test_the_rate_grows_as_asked():
    assert [rate_factor(4.0, how) for how in ("root", "linear", "none")] == [2.0, 4.0, 1.0]


def _losses(penalties: dict[float, float], spread: float, replicas: int = 4) -> dict[float, list[float]]:
    """Draw losses of branches: a term for each replica, the cost of the batch, and noise."""
    draw = random.Random(1)
    shared = [4.0 + draw.gauss(0, 0.2) for _ in range(replicas)]
    return {factor: [each + cost + draw.gauss(0, spread) for each in shared] for factor, cost in penalties.items()}


def test_the_batch_from_which_on_losses_are_worse_is_found():
    found = judge(_losses({0.5: -0.002, 1.0: 0.0, 2.0: 0.004, 4.0: 0.2}, 0.001), batch=64, seq_len=128, tolerance=0.005)
    assert [row.verdict for row in found.rows] == ["as good", "as good", "as good", "worse"]
    assert (found.critical, found.begins) == (128, 256)
    assert found.words.startswith("With 128 sequences a step,") and "with 256, it is worse" in found.words
    assert found.rows[3].excess == pytest.approx(0.2, abs=0.01) and (found.rows[3].error or 1.0) < 0.01


def test_noise_decides_nothing_and_what_is_not_worse_has_no_end():
    noisy = judge(_losses({1.0: 0.0, 2.0: 0.05, 4.0: 0.05}, 0.3), batch=8, seq_len=16, tolerance=0.005)
    assert {row.verdict for row in noisy.rows if row.factor > 1} == {"not decided"} and noisy.begins is None
    assert noisy.words.startswith("Whether the loss is as good with batches above the run's own 8 sequences is not certain")
    good = judge(_losses({1.0: 0.0, 2.0: 0.0}, 0.001), batch=8, seq_len=16, tolerance=0.005)
    assert (good.critical, good.begins) == (
        16,
        None,
    ) and "Whether it is as good with more than 16 sequences is not certain" in good.words


def test_one_replica_has_no_error_and_says_so():
    found = judge({1.0: [4.0], 2.0: [4.5]}, batch=8, seq_len=16, tolerance=0.005)
    assert found.rows[1].error is None and found.begins == 16
    assert "-" in [str(cell) for cell in drawn.table(found).columns[4].cells]
    assert drawn.picture(found).startswith("<svg")
