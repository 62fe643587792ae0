"""An update made before the norm is known, and undone if it was wrong, changes no bit of a run."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.events import EarlyUpdatesPaused, Step, Validation, of_kind, read
from megalith.fleet.exit_codes import ExitCode
from megalith.parallel.data import local
from megalith.parallel.gradients import NotFinite
from megalith.prove.compare import compare
from megalith.prove.parity import record, reference, shrink
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.decide import MAXIMUM, WINDOW
from megalith.train.loop import stepper_of
from megalith.train.step import StepResult
from tests.full import sampled
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.patience import PATIENCE
from tests.ranks import run_ranks
from tests.runs import assert_same_bits, final_state, finish, position, prepare_text, signal_yourself, start, train, when
from tests.specs import tiny_run

STEPS = 6
PLANS: list[dict[str, Any]] = [
    {},
    {"pipeline": 2, "schedule": "zb-h2"},
    {"pipeline": 4, "schedule": "zb-h2"},
    {"pipeline": 2, "data": 2, "zero": 1, "schedule": "zb-h2"},
    {"pipeline": 2, "data": 2, "zero": 3, "schedule": "zb-h2"},
    {"pipeline": 2, "chunks": 2, "schedule": "dualpipev", "data": 2, "expert": 2},
    {"pipeline": 4, "schedule": "dualpipe", "zero": 1},
    {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "tensor": 2},
]


def _spec(plan: dict[str, Any], *, clip: float, late: bool, **parts: dict[str, Any]) -> RunSpec:
    model = {"preset": "deepseek-tiny"} if "expert" in plan else {}
    batch = 4 * plan.get("data", 1) * plan.get("pipeline", 1)
    tables = {"plan": plan, "train": {"global_batch": batch}, "model": model} | parts
    spec = shrink(tiny_run(**tables), steps=STEPS)
    changes = {
        "plan": spec.plan.model_copy(update={"post_validation": late}),
        "optimizer": spec.optimizer.model_copy(update={"clip": clip, "lr": 1e-3}),
    }
    return spec.model_copy(update=changes)


def _state(trainer: Trainer) -> dict[str, Tensor]:
    return {name: local(tensor).clone() for name, tensor in trainer.state.tensors().items()}


def _steps(trainer: Trainer) -> list[StepResult]:
    stepper = stepper_of(trainer)
    told = [done for step in range(STEPS) for done in stepper.step(microbatches(trainer, step), step=step)]
    return told + stepper.settle()


def _lost(done: StepResult) -> bool:
    return any(name == "LOST" for name, _, _ in done.spans)


@dataclass(frozen=True)
class Beside:
    """One rank's run, synchronous or with post-validation."""

    limit: float
    different: list[str]
    numbers: list[list[tuple[int, float, float, float, dict[str, float]]]]
    again: list[bool]  # steps whose row was started twice


def _beside(rank: int, plan: dict[str, Any]) -> Beside:
    limit = median(done.grad_norm for done in _steps(trainer_of(_spec(plan, clip=0.0, late=False))))
    states, numbers, again = [], [], []
    for late in (False, True):
        trainer = trainer_of(_spec(plan, clip=limit, late=late))
        told = _steps(trainer)
        states.append(_state(trainer))
        numbers.append([(done.step, done.loss, done.grad_norm, done.lr, done.experts) for done in told])
        again = [_lost(done) for done in told]
    different = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    return Beside(limit, different, numbers, again)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@sampled(4, together=True)
def test_weights_moments_losses_and_norms_are_those_of_the_synchronous_run_bit_for_bit(plan: dict[str, Any]) -> None:
    for found in run_ranks(_beside, _spec(plan, clip=1.0, late=True).plan.ranks, plan):
        assert found.different == []
        assert found.numbers[0] == found.numbers[1]
        clipped = [norm > found.limit for _, _, norm, _, _ in found.numbers[0]]
        assert set(clipped[:-1]) == {True, False}, "some steps are clipped, and some are not"
        assert found.again == [False, *clipped[:-1]], "a row begins again when the step before it was clipped, and only then"


def _often_clipped(rank: int, plan: dict[str, Any], limits: tuple[float, ...]) -> tuple[list[str], list[list[StepResult]]]:
    """Train synchronously and with post-validation, each step with its own clip limit; return what differs at the end, and the steps."""
    states, runs = [], []
    for late in (False, True):
        trainer = trainer_of(_spec(plan, clip=1.0, late=late))
        spec, stepper, told = trainer.spec, stepper_of(trainer), list[StepResult]()
        for step, clip in enumerate(limits):
            trainer.spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"clip": clip})})
            told += stepper.step(microbatches(trainer, step % STEPS), step=step)
            told += stepper.settle() if stepper.must_settle else []
        runs.append(told + stepper.settle())
        states.append(_state(trainer))
    return [name for name in states[0] if not torch.equal(states[0][name], states[1][name])], runs


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLANS[1], PLANS[4]], ids=str)
@sampled(1)
def test_updates_wait_for_the_norm_while_most_are_clipped(plan: dict[str, Any]) -> None:
    """A clipped step costs no second row then, and updates are early again once few are clipped."""
    clipped = MAXIMUM + 3
    # a step is verified in the next one, with that step's limit
    limits = (1e-4,) * clipped + (0.0,) * (WINDOW + 2)
    for different, (plain, late) in run_ranks(_often_clipped, _spec(plan, clip=1.0, late=True).plan.ranks, plan, limits):
        assert different == []
        assert [(one.step, one.loss, one.grad_norm, one.updates) for one in plain] == [
            (one.step, one.loss, one.grad_norm, one.updates) for one in late
        ]
        events = [event for one in late for event in one.outcome.events]
        assert [(type(event), event.step, event.paused) for event in events if isinstance(event, EarlyUpdatesPaused)] == [
            (EarlyUpdatesPaused, MAXIMUM + 1, True),
            (EarlyUpdatesPaused, clipped + WINDOW - MAXIMUM, False),
        ]
        assert [one.step for one in late if _lost(one)] == [*range(1, MAXIMUM + 2)]


def _record(rank: int, spec: RunSpec) -> Any:
    return record(trainer_of(spec))


@pytest.mark.parametrize("plan", [{"pipeline": 2, "schedule": "zb-v", "chunks": 2}, {"data": 2, "zero": 2}], ids=str)
def test_it_trains_like_one_process(plan: dict[str, Any]) -> None:
    spec = _spec(plan, clip=1e-3, late=True, model={"tied": True})
    found = run_ranks(_record, spec.plan.ranks, spec)[0]
    rows = compare(reference(spec, device=CPU), found, spec=spec)
    assert all(row.equal for row in rows), rows


# --- a gradient that is not finite ---

BAD = 3


def _poisoned(rank: int, plan: dict[str, Any], between: bool) -> tuple[str, list[str]]:
    """Return the error raised for a NaN in step BAD, and the names of values that changed since before that step. `between`: it is found
    between two steps."""
    trainer = trainer_of(_spec(plan, clip=0.0, late=True))
    stepper = stepper_of(trainer)
    for step in range(BAD):
        stepper.step(microbatches(trainer, step), step=step)
    stepper.settle()
    before = _state(trainer)
    if rank == trainer.groups.line[-1]:
        _poison(trainer)
    stepper.step(microbatches(trainer, BAD), step=BAD)
    changed = [name for name, tensor in _state(trainer).items() if not torch.equal(before[name], tensor)]
    assert changed, "the update was made"
    with pytest.raises(NotFinite) as raised:
        stepper.settle() if between else stepper.step(microbatches(trainer, BAD + 1), step=BAD + 1)
    after = _state(trainer)
    return str(raised.value), [name for name in before if not torch.equal(before[name], after[name])]


def _poison(trainer: Trainer) -> None:
    """Make the next gradient of one parameter NaN."""
    parameter = next(iter(trainer.runners[max(trainer.runners)].stage.parameters()))
    handle = parameter.register_hook(lambda grad: (handle.remove(), grad * torch.nan)[1])


@sampled(4, together=True)
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("plan", [PLANS[2], PLANS[5]], ids=str)
def test_a_nan_names_its_own_step_and_leaves_the_weights_before_it(plan: dict[str, Any], between: bool) -> None:
    for message, changed in run_ranks(_poisoned, _spec(plan, clip=0.0, late=True).plan.ranks, plan, between):
        assert message.startswith(f"step {BAD + 1}: ")
        assert changed == []


# --- its purpose ---


def _hold_the_last(trainer: Trainer, folder: Path, patience: float) -> list[bool]:
    """Hold the last rank's last computation of every step except the first and the last until the others have begun the next step,
    or for `patience` seconds. Return for each of these steps whether the others had begun the next one."""
    rank, last = trainer.groups.rank, len(trainer.groups.line) - 1
    calls, seen, run = [0], [], trainer.executor.run
    each = 0  # computations of one step, counted in the first

    def begun(step: int) -> list[Path]:
        return [folder / f"{other}-{step}" for other in range(last)]

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def working(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            step = (calls[0] - 1) // each if each else 0
            if rank < last:
                (folder / f"{rank}-{step}").touch()
            elif each and calls[0] % each == 0 and step < STEPS - 1:
                end = time.monotonic() + patience
                while time.monotonic() < end and not all(path.exists() for path in begun(step + 1)):
                    time.sleep(0.005)
                seen.append(all(path.exists() for path in begun(step + 1)))
            return (yield from work(*args, **kwargs))

        return working

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal each
        executed = run(*args, **kwargs)
        each = each or calls[0]
        return executed

    for runner in trainer.runners.values():
        for name in ("forward", "backward", "input_backward", "weight_backward"):
            setattr(runner, name, counted(getattr(runner, name)))
    trainer.executor.run = noted  # pyright: ignore[reportAttributeAccessIssue]
    return seen


def _held(rank: int, late: bool, folder: Path, patience: float) -> list[bool]:
    trainer = trainer_of(_spec({"pipeline": 4, "schedule": "zb-h2"}, clip=0.0, late=late))
    seen = _hold_the_last(trainer, folder, patience)
    _steps(trainer)
    return seen


@pytest.mark.parametrize("late", [False, True])
def test_no_rank_waits_for_the_others_between_two_steps(late: bool, tmp_path: Path) -> None:
    """Ranks of ZB-H2 end a step one after another: the first ranks are in the next step while the last is still in this one."""
    seen = run_ranks(_held, 4, late, tmp_path, PATIENCE if late else 0.3)[-1]
    assert seen == [late] * (STEPS - 2), "the synchronous step waits for all, the other one for none"


# --- through the loop ---

CLIP = 1.25  # the norms of this text's gradients rise from 1.05 to 1.4


def _run(data: Path, **plan: Any) -> RunSpec:
    return tiny_run(
        model={"vocab": 264},
        plan={"pipeline": 2, "schedule": "zb-h2"} | plan,
        data={"path": str(data)},
        train={"steps": 10, "global_batch": 8, "seq_len": 32, "precision": "bf16"},
        checkpoint={"every": 3},
        validation={"every": 4, "samples": 4},
        optimizer={"warmup": 4, "schedule": "cosine", "clip": CLIP},
    )


def _steps_logged(folder: Path) -> dict[int, tuple[float, float, int]]:
    return {e.step: (e.loss, e.grad_norm, e.tokens_seen) for e in of_kind(read(folder), Step)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that is never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(_run(data), folder)
    clipped = [norm > CLIP for _, norm, _ in _steps_logged(folder).values()]
    assert set(clipped) == {True, False}, "some steps are clipped, and some are not"
    return folder


@sampled(4, together=True)
def test_killed_and_started_again_it_ends_with_the_bits_of_a_synchronous_run(data: Path, whole: Path, tmp_path: Path) -> None:
    spec = _run(data, post_validation=True)

    with when("step", 4, rank=0, act=lambda: signal_yourself(signal.SIGKILL)):
        assert -signal.SIGKILL in finish(start(spec, tmp_path))
    train(spec, tmp_path)
    assert_same_bits(final_state(whole), final_state(tmp_path))
    assert position(tmp_path) == position(whole) == {"step": 10, "samples": 80, "updates": 10}
    assert _steps_logged(tmp_path) == _steps_logged(whole)
    assert [(e.step, e.loss) for e in of_kind(read(tmp_path), Validation)][-3:] == [
        (e.step, e.loss) for e in of_kind(read(whole), Validation)
    ]


def test_a_signal_is_handled_a_step_later_and_nothing_unchecked_is_saved(data: Path, whole: Path, tmp_path: Path) -> None:
    spec = _run(data, post_validation=True)

    with when("step", 2, rank=1, act=lambda: signal_yourself(signal.SIGTERM)):
        assert finish(start(spec, tmp_path)) == [ExitCode.STOPPED] * 2
    stopped = position(tmp_path)["step"]
    assert 2 < stopped < 10
    assert set(_steps_logged(tmp_path)) == set(range(1, stopped + 1))
    train(spec, tmp_path)
    assert_same_bits(final_state(whole), final_state(tmp_path))
