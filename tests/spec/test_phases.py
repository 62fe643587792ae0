from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.spec import files
from megalith.spec.files import Layer
from megalith.spec.phases import Phase, Phases, Point, during
from megalith.spec.problem import SpecErrors
from megalith.spec.quantity import Amount
from megalith.train.optimizers.rates import learning_rate
from megalith.train.restore import Position, read_numbers

MODEL = {"dim": 32, "layers": 1, "heads": 2, "vocab": 64, "family": "llama", "ffn": 64}


def run(train: dict, data: dict | None = None, optimizer: dict | None = None) -> dict:
    tables = {"model": MODEL, "data": {"path": "none"} | (data or {})}
    train = {"steps": 100, "seq_len": 64, "global_batch": 4} | train
    return tables | {"train": train, "optimizer": {"warmup": 0} | (optimizer or {})}


def load(*tables: dict | None) -> files.ResolvedRun:
    return files.resolve([Layer(run(*tables), "file run.toml")])  # type: ignore[arg-type]


points = st.lists(
    st.builds(
        lambda begin, unit, changes: Point("p", begin if unit == "plain" else Amount(begin, unit), changes),
        st.integers(0, 400),
        st.sampled_from(["plain", "steps", "samples", "tokens"]),
        st.fixed_dictionaries({}, optional={"global_batch": st.integers(1, 9), "seq_len": st.integers(1, 7)}),
    ),
    max_size=5,
)


@pytest.mark.slow
@given(points, st.integers(1, 60))
def test_what_is_computed_is_what_going_step_by_step_finds(given_points, steps):
    phases = Phases.walk(Phase(0, 0, 0, 0, 3, 4, None), given_points)
    samples = tokens = 0
    firsts = list[int]()
    for step in range(steps):
        phase = phases.at(samples)
        firsts.append(samples)
        assert (phases.after(0, step), phases.tokens(samples)) == (samples, tokens)
        assert phase.step <= step and (samples - phase.first) % phase.global_batch == 0
        for unit, consumed in (("steps", step), ("samples", samples), ("tokens", tokens)):
            assert step == 0 or phases.steps_to(Amount(consumed, unit)) == step
        samples, tokens = samples + phase.global_batch, tokens + phase.global_batch * phase.seq_len
    assert [phases.before(samples, steps - at) for at in range(steps)] == firsts
    assert sum(count for _, count in phases.spans(steps)) == steps
    assert all(before.first < after.first for before, after in pairwise(phases.all))


@pytest.mark.slow
@given(points, points, st.integers(1, 40))
def test_points_added_later_leave_what_was_consumed_as_it_was(before, later, steps):
    start = Phase(0, 0, 0, 0, 3, 4, None)
    consumed = Phases.walk(start, before).after(0, steps)
    added = [Point(p.key, consumed + (p.begin if isinstance(p.begin, int) else p.begin.number), p.changes) for p in later]
    both = Phases.walk(start, [*before, *added])
    one, other = Phases.walk(start, before).begun(consumed), both.begun(consumed)
    assert [phase.values for phase in one] == [phase.values for phase in other]


def test_a_ramp_and_phases_are_one_sequence_in_which_the_last_word_counts():
    spec = load(
        {"batch_ramp": [{"begin": 40, "global_batch": 8}, {"begin": 100, "global_batch": 16}]},
        {"phases": [{"begin": 60, "seq_len": 128, "weights": {"a": 1.0}}, {"begin": 100, "global_batch": 2}]},
    ).spec
    found = [(each.first, each.step, each.tokens, each.seq_len, each.global_batch, each.weights) for each in Phases.of(spec).all]
    assert found == [
        (0, 0, 0, 64, 4, None),
        (40, 10, 40 * 64, 64, 8, None),
        (64, 13, 64 * 64, 128, 8, {"a": 1.0}),  # the first step that begins at sample 60 or later
        (104, 18, 64 * 64 + 40 * 128, 128, 2, {"a": 1.0}),
    ]
    last = during(spec, Phases.of(spec).all[-1])
    assert (last.train.seq_len, last.train.global_batch, last.data.weights) == (128, 2, {"a": 1.0})
    assert len(Phases.of(last).all) == 1


def test_lengths_may_be_given_in_tokens_samples_or_steps():
    """The run has 4 x 64 tokens a step up to sample 400, then 8 x 64."""
    ramp = [{"begin": "25.6K tokens", "global_batch": 8}]
    found = load(
        {"steps": "102_400 tokens", "batch_ramp": ramp}, None, {"warmup": "40 samples", "schedule": "wsd", "decay": "80 samples"}
    )
    assert found.spec.train.batch_ramp[0].begin == 400
    assert found.spec.train.steps == 100 + (102_400 - 25_600) // 512
    assert found.spec.optimizer.warmup == 10
    assert found.spec.optimizer.decay == 10
    assert found.provenance["train.steps"] == 'file run.toml: "102_400 tokens"'
    again = files.resolve([Layer(found.spec.model_dump(exclude_none=True), "again")]).spec
    assert again == found.spec, "what is written once is read alike"


def test_a_decay_in_steps_is_over_as_many_updates():
    spec = load({}, None, {"schedule": "wsd", "decay": "20 steps", "min_lr_ratio": 0.0, "lr": 1.0}).spec
    rates = [learning_rate(update, spec=spec.optimizer, steps=100) for update in range(100)]
    assert rates[:80] == [1.0] * 80 and rates[80] == pytest.approx(0.95) and rates[-1] == 0.0


@pytest.mark.parametrize("text", ["many tokens", "5 miles", "tokens", "-3 steps"])
def test_what_is_no_length_is_refused_by_name(text):
    with pytest.raises(SpecErrors) as refused:
        load({"steps": text})
    (problem,) = refused.value.problems
    assert problem.key == "train.steps" and "500M tokens" in problem.way_out


def test_losses_are_compared_while_the_text_stays_and_the_batch_does_not_fall():
    ramp = [{"begin": 40, "global_batch": 8}, {"begin": 400, "global_batch": 2}]
    spec = load({"batch_ramp": ramp}, {"phases": [{"begin": 80, "seq_len": 32}, {"begin": 160, "weights": {"a": 1.0}}]}).spec
    assert Phases.of(spec).texts == (0, 0, 2, 3, 4)


def test_numbers_with_letters_are_read_in_points_too():
    ramp = [{"begin": "16M tokens", "global_batch": "1k"}]
    found = load(
        {"steps": "100M tokens", "seq_len": "8k", "batch_ramp": ramp}, {"phases": [{"begin": "4k", "seq_len": "16k"}]}
    ).spec
    assert (found.train.batch_ramp[0].begin, found.train.batch_ramp[0].global_batch) == (
        1956,
        1024,
    )  # the first step of 4 samples that begins there or later
    assert (found.data.phases[0].begin, found.data.phases[0].seq_len) == (4000, 16384)
    assert Phases.of(found).all[0].seq_len == 8192


def test_a_share_and_a_length_of_warmup_both_stand():
    assert load({}, None, {"warmup": "2%"}).spec.optimizer.warmup == "2%"
    assert load({}, None, {"warmup": "2%"}).spec.optimizer.warmup_updates(100) == 2
    assert load({}, None, {"warmup": "2_560 tokens"}).spec.optimizer.warmup == 10
    assert load({}, None, {"warmup": "2k"}).spec.optimizer.warmup == 2000


def test_any_step_since_a_position_is_found_through_phases():
    spec = load({"batch_ramp": [{"begin": 40, "global_batch": 8}]}).spec
    begin = Position(step=12, samples=36, updates=9)  # three of its updates were undone by a rewind or skipped
    found = [range(36, 40), range(40, 48), range(56, 64)]
    assert [read_numbers(spec, begin, step) for step in (12, 13, 15)] == found
    later = Position(step=16, samples=64)
    assert [read_numbers(spec, later, step) for step in (12, 13, 15)] == found, "of steps before a restart"
