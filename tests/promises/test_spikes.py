"""A run notices a spike, names its cause and responds as configured: equally on all ranks, through kills, under another plan."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalith.events import Event, Lowered, Rewound, Skipped, Spike, Step, of_kind, read
from megalith.fleet.tiers import copies, newest
from megalith.prove.spikes import Fault, RunEnd
from megalith.spec.run import RampSpec
from megalith.train.loop import Loop
from megalith.train.restore import Position
from megalith.train.stability import healer as healers
from megalith.train.stability.findings import SpikeError
from tests.full import sampled
from tests.keys import KEY
from tests.ranks import run_ranks
from tests.train.prepared import small_data
from tests.train.spiking import BATCH, spike, spiky_run
from tests.watch.pages import one_page

LADDER = ("skip", "rewind", "lower", "stop")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_data(tmp_path_factory.mktemp("data"))


Faults = tuple[Fault, ...]
POISON, RATE = (Fault("poison", 40, 1.0, lasts=3),), (Fault("rate", 40, 20.0, lasts=4),)
ACCIDENT = (Fault("gradient", 40, 30, place=0.99),)


def train(folder: Path, spec: Any, faults: Faults = (), *wrong: int, **rest: Any) -> tuple[RunEnd, list[Event]]:
    folder.mkdir(exist_ok=True)
    ended = run_ranks(_train, spec.plan.ranks, spec, folder, faults, wrong, rest)
    assert all(one.position == ended[0].position for one in ended)
    return ended[0], list(read(folder))


def _train(rank: int, spec: Any, folder: Path, faults: Faults, wrong: tuple[int, ...], rest: dict[str, Any]) -> RunEnd:
    return spike(rank, spec, folder, faults, wrong, **rest)


def same(one: RunEnd, other: RunEnd) -> bool:
    return all(torch.equal(one.state[name], tensor) for name, tensor in other.state.items())


def test_by_default_it_warns_and_changes_nothing(data: str, tmp_path: Path) -> None:
    watched, told = train(tmp_path / "a", spiky_run(data), POISON)
    blind, silent = train(tmp_path / "b", spiky_run(data, watch=False), POISON)
    assert [(one.step, one.answer) for one in of_kind(told, Spike)] == [(41, "none")]
    assert not of_kind(silent, Spike) and same(watched, blind)


@sampled(3, together=True)
@pytest.mark.parametrize(("faults", "wrong", "cause", "answer"), [
    (POISON, (), "data", "skipped"),
    (RATE, (), "schedule", "rewound"),
    ((), (40,), "hardware", "rewound"),
])  # fmt: skip
def test_the_likeliest_cause_is_the_right_one(
    data: str, tmp_path: Path, faults: Faults, wrong: tuple[int, ...], cause: str, answer: str
) -> None:
    spec = spiky_run(data, answers=LADDER)
    if cause == "data":  # the step is also verified, by a second computation of its samples
        fleet = spec.fleet.model_copy(update={"verify_every": POISON[0].step, "verify": "all"})
        spec = spec.model_copy(update={"fleet": fleet})
    ended, told = train(tmp_path, spec, faults, *wrong)
    first = of_kind(told, Spike)[0]
    assert (first.cause, first.answer) == (cause, answer), first
    assert ended.position.updates == 60
    assert bool(of_kind(told, Rewound)) == (answer == "rewound")
    if cause == "hardware":
        evidence = first.causes[0]["evidence"]
        assert "step 42 had loss" in evidence and "shows first in the head" in evidence, evidence
    if cause == "data":
        evidence = first.causes[0]["evidence"]
        assert f"samples {40 * BATCH} to {41 * BATCH - 1}" in evidence and ".bin" in evidence, evidence
        assert [one.step for one in of_kind(told, Skipped)] == [41, 42, 43]


def test_an_accident_leaves_no_trace(data: str, tmp_path: Path) -> None:
    """A gradient that is wrong once is recomputed, and the run ends with the bits of an undisturbed one."""
    spec = spiky_run(data, answers=LADDER)
    hurt, told = train(tmp_path / "hurt", spec, ACCIDENT)
    assert [(one.step, one.cause, one.answer) for one in of_kind(told, Spike)] == [(41, "hardware", "repeated")]
    clean, silent = train(tmp_path / "clean", spec)
    assert same(hurt, clean) and hurt.position == clean.position and not of_kind(silent, Spike)


@sampled(3, together=True)
@pytest.mark.parametrize(
    "plan", [{}, {"data": 2, "zero": 1}, {"pipeline": 2, "schedule": "zb-h2", "post_validation": True}], ids=str
)
def test_a_rewind_leaves_out_the_updates_since_the_copy(data: str, tmp_path: Path, plan: dict[str, Any]) -> None:
    """The run ends with the bits of one that skipped those steps from the beginning, and never reads their samples again."""
    ended, told = train(tmp_path / "a", spiky_run(data, plan=plan, answers=("rewind",), margin=3), (), 33)
    (rewound,) = of_kind(told, Rewound)
    assert (rewound.step, rewound.to, rewound.undone, rewound.tier) == (35, 30, 4, "memory")
    assert (rewound.first, rewound.last) == (30 * BATCH, 35 * BATCH - 1)
    assert ended.position == Position(step=65, samples=65 * BATCH, updates=60)
    losses, marks, _ = one_page(tmp_path / "a", tmp_path / "page")
    assert list(losses) == [one.step for one in of_kind(told, Step)], "one curve on the page: the rewound step has no loss"
    assert marks.count("rewound") == 1
    if not plan:
        late = ended.read[-30 * BATCH :]
        assert set(late) == set(range(35 * BATCH, 65 * BATCH)), "after it went back, only new samples are read"

    def leave_out(loop: Loop, step: int) -> None:
        if step == 30:  # as if the steps to the rewind had not been tried
            loop.position = Position(35, 35 * BATCH, 30)
            loop.trainer.state.skipped = 5

    if not plan:
        straight = spike_alone(spiky_run(data), tmp_path / "b", leave_out)
        assert same(ended, straight)


def spike_alone(spec: Any, folder: Path, after: Any) -> RunEnd:
    folder.mkdir()
    return run_ranks(_alone, 1, spec, folder, after)[0]


def _alone(rank: int, spec: Any, folder: Path, after: Any) -> RunEnd:
    return spike(rank, spec, folder, (), after=after)


def test_a_loss_scale_that_changed_is_no_fault_of_the_hardware(data: str, tmp_path: Path) -> None:
    """With another loss scale, other gradients underflow, so the steps since the copy would not give their numbers again."""
    spec = spiky_run(data, answers=("rewind",), margin=3)
    update: dict[str, Any] = {
        "train": spec.train.model_copy(update={"precision": "fp16"}),
        "loss_scale": spec.loss_scale.model_copy(update={"initial": 1, "growth_interval": 41}),
    }
    _, told = train(tmp_path, spec.model_copy(update=update), RATE)
    (rewound,) = of_kind(told, Rewound)
    assert rewound.to < 41 < rewound.step, "the scale was doubled since the copy"
    assert rewound.replayed == 0
    assert of_kind(told, Spike)[0].cause == "schedule"


def test_a_second_spike_at_the_same_place_goes_further_back(data: str, tmp_path: Path) -> None:
    ended, told = train(tmp_path, spiky_run(data, answers=("rewind",), rewinds=2), (), 33, 38)
    first, second = of_kind(told, Rewound)
    assert (first.step, first.to, first.left, second.step, second.to, second.left) == (35, 32, 1, 40, 30, 0)
    assert ended.position == Position(step=70, samples=70 * BATCH, updates=60), "ten updates are left out in all"


def test_the_ladder_ends_with_a_lower_rate_or_the_end(data: str, tmp_path: Path) -> None:
    _, told = train(tmp_path / "lower", spiky_run(data, answers=("lower",), lower_for=7), (), 40)
    lowered = of_kind(told, Lowered)[0]
    assert lowered.until - 41 == 7, lowered
    with pytest.raises(Exception, match="Likely cause: ") as caught:
        train(tmp_path / "stop", spiky_run(data, answers=("stop",)), (), 40)
    assert SpikeError.__name__ in str(caught.value)


@sampled(3, together=True)
def test_a_learning_rate_that_jumped_is_held_at_what_it_was(data: str, tmp_path: Path) -> None:
    """The wrong rate lasts for three more steps, which need no further rewind."""
    ended, told = train(tmp_path / "held", spiky_run(data, answers=LADDER, lower_for=30), RATE)
    (rewound,), (held,) = of_kind(told, Rewound), of_kind(told, Lowered)
    rates = {one.step: one.lr for one in of_kind(told, Step)}
    assert held.at_most is not None and held.step == rewound.step + 1 and held.until == rewound.to + 30
    assert rates[40] == held.at_most, "of the step before the jump"
    after = [rate for step, rate in rates.items() if rewound.step < step <= rewound.step + 30]
    assert max(after) <= held.at_most < rates[41] / 10
    assert rates[max(rates)] > 0 and ended.position.updates == 60
    assert train(tmp_path / "none", spiky_run(data, answers=("rewind",), rewinds=2), RATE)[1] and not of_kind(
        read(tmp_path / "none"), Lowered
    )


@sampled(3, together=True)
def test_a_learning_rate_that_does_its_damage_slowly_is_undone_from_its_first_step(data: str, tmp_path: Path) -> None:
    """The first number outside its band comes some steps after the jump, and copies of the steps between have its damage."""
    slow = (Fault("rate", 40, 20.0, lasts=8),)
    ended, told = train(tmp_path, spiky_run(data, answers=LADDER, lower_for=30, margin=1), slow)
    (rewound,) = of_kind(told, Rewound)
    assert rewound.step > 43 and rewound.to <= 40 < rewound.step - 2, "a copy from before the jump, and not the newest"
    assert of_kind(told, Spike)[0].answer == "rewound" and ended.position.updates == 60


def _killed(rank: int, spec: Any, folder: Path, at: str, faults: Faults, wrong: tuple[int, ...]) -> RunEnd:
    """Kills its rank in the middle of the first rewind."""

    def die(*_: Any, **__: Any) -> None:
        if dist.get_world_size() == 1 or rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(healers.Healer if at == "_replay" else healers.StateGuard, at, die):  # it must exist
        return spike(rank, spec, folder, faults, wrong)


@sampled(3, together=True)
@pytest.mark.parametrize(("at", "faults", "wrong"), [("_replay", RATE, ()), ("adopt", RATE, ()), ("adopt", (), (40,))], ids=str)
def test_killed_in_the_middle_of_a_rewind_it_ends_in_the_same_bits(
    data: str, tmp_path: Path, at: str, faults: Faults, wrong: tuple[int, ...]
) -> None:
    """A wrong weight is known by the batch before, whose loss the resumed run has in its history alone."""
    spec = spiky_run(data, plan={"data": 2, "zero": 1}, answers=LADDER)
    straight, _ = train(tmp_path / "straight", spec, faults, *wrong)
    (tmp_path / "killed").mkdir()
    with pytest.raises(RuntimeError):
        run_ranks(_killed, 2, spec, tmp_path / "killed", at, faults, wrong)
    found = newest(copies.survey(tmp_path / "killed" / "memory", placement=("n0",), world=2, key=KEY))
    assert found is not None and 0 < found.step < straight.position.step
    again, told = train(tmp_path / "killed", spec, faults, *wrong, source=found)
    assert again.position == straight.position and of_kind(told, Rewound)
    assert same(again, straight)


def test_history_goes_with_a_checkpoint_to_another_plan(data: str, tmp_path: Path) -> None:
    """After a rewind a run continues with another number of ranks. It reads the same samples and makes the same decisions."""
    spec = spiky_run(data, answers=("rewind",), steps=45)
    ended, told = train(tmp_path, spec, (), 33)
    (rewound,) = of_kind(told, Rewound)
    longer = spiky_run(data, plan={"data": 2}, answers=("rewind",), steps=48)
    more, told = train(tmp_path, longer)
    losses, marks, _ = one_page(tmp_path, tmp_path / "page")
    assert list(losses) == [one.step for one in of_kind(told, Step)] and marks.count("rewound") == 1, "one curve on the page"
    assert more.position.history.rewinds == ended.position.history.rewinds == ((rewound.step, rewound.to),)
    assert more.position.samples == ended.position.samples + 3 * BATCH
    assert min(more.read) >= ended.position.samples


@sampled(3, together=True)
@pytest.mark.parametrize("plan", [{}, {"pipeline": 2, "schedule": "zb-h2", "post_validation": True}], ids=str)
def test_a_rewind_goes_back_into_an_earlier_phase(data: str, tmp_path: Path, plan: dict[str, Any]) -> None:
    """There is a spike in the first step of a phase with a larger batch. Steps of the phase before are recomputed with their
    own batch."""
    spec = spiky_run(data, plan=plan, answers=("rewind",), margin=3)
    ramp = (RampSpec(begin=32 * BATCH, global_batch=2 * BATCH),)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"batch_ramp": ramp})})
    ended, told = train(tmp_path, spec, (), 31)
    (rewound,) = of_kind(told, Rewound)
    assert rewound.step == 33 and rewound.to <= 29 and rewound.undone == 32 - rewound.to
    assert (rewound.first, rewound.last) == (rewound.to * BATCH, 34 * BATCH - 1)
    assert rewound.replayed == 33 - rewound.to, "every step before the wrong weight gave its numbers again"
    steps = 60 + 33 - rewound.to
    assert ended.position == Position(step=steps, samples=(2 * steps - 32) * BATCH, updates=60)
