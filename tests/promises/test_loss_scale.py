"""fp16 with a loss scale: the scale changes no bit of a gradient, a step with an overflow is skipped, and the scale is state."""

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.memory import Memory
from megalith.events import EventLog, Skipped, Step, of_kind, read
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.observations import Observation, StateCorrupt
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.report import Reported
from megalith.fleet.tiers import Source, Tier
from megalith.kernels import cross_entropy
from megalith.parallel.data import Weight, local
from megalith.parallel.gradients import NotFinite
from megalith.spec.run import RunSpec
from megalith.train import step as steps
from megalith.train.assemble import Trainer
from megalith.train.decide import Decision, Skip
from megalith.train.guard import StateGuard
from megalith.train.loop import Loop, stepper_of
from megalith.train.measure.peak import Yardstick
from megalith.train.restore import restore
from megalith.train.stability.loss_scale import Scale
from megalith.train.step import StepResult, accumulate, seed_step
from megalith.train.step_hooks import Attendants, StepHook
from megalith.train.stream import open_stream
from tests.full import FULL, sampled
from tests.keys import KEY
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import everyone, run_ranks
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data

SMALLEST = 2.0**-14
"""The smallest normal number of fp16."""
TOO_LARGE = 2.0**40
"""A scale at which the gradients of any model overflow."""


def fp16(
    plan: dict[str, Any], *, scale: dict[str, int] | None = None, train: dict[str, Any] | None = None, **rest: Any
) -> RunSpec:
    numbers = {"global_batch": 8, "seq_len": 16, "precision": "fp16"} | (train or {})
    optimizer = {"warmup": 4, "schedule": "cosine", "lr": 1e-3}  # so that the rate shows the number of updates that were counted
    return tiny_run(plan=plan, train=numbers, optimizer=optimizer, loss_scale={"initial": 1024} | (scale or {}), **rest)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    found = trainer.state.tensors()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


# --- the scale changes no bit ---


class Subnormals(TorchDispatchMode):
    """Counts subnormal fp16 numbers among the results of a backward. The loss computes its gradients in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def look(self, found: Any) -> None:
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor) and each.dtype == torch.float16:
                size = each.abs().double()
                self.count += int(((size > 0) & (size < SMALLEST)).sum())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        fresh = not any(each.alias_info for each in func._schema.returns) and "empty" not in func.__name__  # uninitialised memory
        if fresh and torch._C._current_graph_task_id() != -1:
            with _disable_current_modes():
                self.look(found)
        return found


def gradients(rank: int, spec: RunSpec) -> tuple[dict[str, Tensor], int]:
    trainer, chunk = trainer_of(spec), cross_entropy._chunk

    def counted(*args: Any) -> Any:
        loss, grad = chunk(*args)
        with _disable_current_modes():
            seen.look(grad)
        return loss, grad

    with Subnormals() as seen, mock.patch.object(cross_entropy, "_chunk", counted):
        accumulate(trainer, microbatches(trainer))
    return {name: local(p.grad).clone() for name, p in trainer.parameters.items() if p.grad is not None}, seen.count


SMALL = {"layers": 1, "dim": 8, "heads": 1, "kv_heads": 1, "head_dim": 4, "ffn": 8, "vocab": 16}
ONE = {"global_batch": 1, "seq_len": 6, "seed": 1}


@pytest.mark.parametrize(("exponent", "exact"), [(15, True), (4, False)])
def test_twice_the_scale_gives_the_same_bits_where_nothing_underflows(exponent: int, exact: bool) -> None:
    """Subnormal gradients lose bits; with a larger scale they lose fewer."""
    runs = [fp16({}, scale={"initial": 2**k}, train=ONE, model=SMALL) for k in (exponent, exponent + 1)]
    (one, few), (other, fewer) = (run_ranks(gradients, 1, spec)[0] for spec in runs)
    assert all(bool(grad.isfinite().all()) for grad in (*one.values(), *other.values()))
    assert (few == fewer == 0) if exact else few > fewer > 0
    assert all(torch.equal(grad, other[name]) for name, grad in one.items()) == exact


@pytest.mark.parametrize("preset", ["tiny", "deepseek-tiny"])
def test_every_loss_is_scaled_once(preset: str) -> None:
    """With z-losses of the output and of routers, balance losses and multi-token prediction, gradients equal fp32's at any
    scale."""
    model = {"preset": preset} | ({} if preset == "tiny" else {"balanced": True})
    train = {"global_batch": 2, "z_loss": 0.1}
    exact = run_ranks(gradients, 1, fp16({}, train=train | {"precision": "fp32"}, model=model))[0][0]
    for exponent in (6, 12):
        found = run_ranks(gradients, 1, fp16({}, scale={"initial": 2**exponent}, train=train, model=model))[0][0]
        for name, grad in exact.items():
            apart = float((found[name] - grad).norm() / grad.norm().clamp(min=1e-4))
            assert apart < 0.1, (name, apart)


# --- a step with an overflow is skipped ---

PLANS: list[dict[str, Any]] = [
    {},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"pipeline": 2, "schedule": "zb-h2", "post_validation": True},
    {"data": 2, "pipeline": 2, "zero": 1, "schedule": "zb-h2", "post_validation": True},
    {"pipeline": 2, "schedule": "dualpipev", "chunks": 2},
    {"data": 2, "tensor": 2, "pipeline": 2, "zero": 2, "schedule": "interleaved", "chunks": 2},
    {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 2, "context": 2},
    {"pipeline": 2, "schedule": "zb-v", "chunks": 2},
    {"pipeline": 2, "schedule": "dualpipe"},
    {"data": 2, "expert": 2, "zero": 2},
]
SHOWN = (0, 1, 4, 7, 9, 12)
"""Plans in every test run; `make test-full` has all."""
MOVING = {"growth_interval": 2, "hysteresis": 1}
"""A scale that changes after a few steps."""
BAD = (1, 4)
TENSOR = "blocks.1.attention.out.weight"


class Overflow(StepHook):
    """Makes the gradient of TENSOR infinite in some steps, wherever it is kept and whenever it is computed."""

    def __init__(self, trainer: Trainer, *bad: int) -> None:
        self.bad, self.now, watcher, add = bad, False, self, Weight.add
        kept = trainer.parameters.get(TENSOR)

        def overflowing(self: Weight, share: Tensor) -> None:
            add(self, share * torch.inf if watcher.now and self.master is kept else share)

        Weight.add = overflowing  # permanently: a rank is a process of its own

    def before_step(self, trainer: Trainer, step: int) -> None:
        self.now = step in self.bad


@contextmanager
def told_to_skip(*chosen: int) -> Iterator[None]:
    """While the block runs, the updates of the chosen steps are skipped whatever their gradients, and the scale changes as after an
    overflow."""
    decide, asked = steps.decide, iter(range(1000))

    def told(vitals: Any, **specs: Any) -> Decision:
        decision = decide(vitals, **specs)
        return Skip("told to", scale=vitals.scale.overflowed(specs["loss_scale"])) if next(asked) in chosen else decision

    with mock.patch.object(steps, "decide", told):
        yield


def trained(trainer: Trainer, step_hooks: list[Any], count: int = 6) -> list[StepResult]:
    stepper, told = stepper_of(trainer, Attendants(step_hooks)), []
    for step in range(count):
        Attendants(step_hooks).notify("before_step", trainer, step)
        seed_step(trainer, step)
        told += stepper.step(microbatches(trainer, step), step=step)
    return told + stepper.settle()


def overflowing(rank: int, spec: RunSpec) -> Any:
    trainer = trainer_of(spec)
    return state_of(trainer), trained(trainer, [Overflow(trainer, *BAD)]), state_of(trainer)


def skipping(rank: int, spec: RunSpec) -> Any:
    trainer = trainer_of(spec)
    with told_to_skip(*BAD):
        told = trained(trainer, [])
    return told, state_of(trainer)


@sampled(2, together=True)
@pytest.mark.parametrize("plan", PLANS if FULL else [PLANS[number] for number in SHOWN], ids=str)
def test_an_overflow_is_a_step_that_is_left_out(plan: dict[str, Any]) -> None:
    """The run has the same bits and scales as one that was told to skip that step: moments, bias correction, learning rate and
    router biases do not advance. Every rank names the tensor, and has the same scale."""
    model = {"preset": "deepseek-tiny"} if plan == PLANS[4] or "expert" in plan else {}
    spec = fp16(plan, scale=MOVING, model=model)
    found = run_ranks(overflowing, spec.plan.ranks, spec)
    expected = run_ranks(skipping, spec.plan.ranks, spec)
    for (before, told, state), (others, other) in zip(found, expected, strict=True):
        assert [one.scale for one in told] == [one.scale for one in others] == [1024, 1024, 512, 512, 1024, 512]
        assert [bool(one.skipped) for one in told] == [bool(one.skipped) for one in others] == [step in BAD for step in range(6)]
        overflow = told[1].overflow
        assert overflow is not None and (overflow.part, overflow.tensor) == ("blocks.1", TENSOR)
        assert (overflow.scale_before, overflow.scale_after) == (1024, 512)
        assert told[-1].updates == 4 and any(not torch.equal(state[name], tensor) for name, tensor in before.items())
        assert all(torch.equal(state[name], tensor) for name, tensor in other.items())


def too_large(rank: int, spec: RunSpec) -> list[StepResult]:
    return trained(trainer_of(spec), [])


def second_overflows(rank: int, spec: RunSpec) -> list[StepResult]:
    trainer = trainer_of(spec)
    return trained(trainer, [Overflow(trainer, 1)])


def test_an_overflow_at_the_floor_counts_against_growth() -> None:
    """The second step overflows at the floor and is skipped: the scale grows after three updates that follow it, not one earlier."""
    scale = {"initial": 2, "floor": 2, "hysteresis": 1, "growth_interval": 3}
    spec = fp16({}, scale=scale, train={"steps": 6}, stability={"not_finite": "skip"})
    (told,) = run_ranks(second_overflows, 1, spec)
    assert [one.scale for one in told] == [2, 2, 2, 2, 2, 4]


@pytest.mark.parametrize("plan", [{}, {"pipeline": 2, "schedule": "zb-h2", "post_validation": True}], ids=str)
def test_a_scale_that_is_too_large_comes_down_until_gradients_fit(plan: dict[str, Any]) -> None:
    """The losses stay finite. The first overflow is in the head, where the scale is applied."""
    spec = fp16(plan, scale={"initial": 2**28, "hysteresis": 2})
    for told in run_ranks(too_large, spec.plan.ranks, spec):
        scales = [one.scale for one in told]
        assert scales[:4] == [2**28, 2**28, 2**27, 2**26]  # the first overflow does not change the scale
        assert all(one.overflow is not None and one.overflow.part == "head" for one in told[:3])
        assert all(math.isfinite(one.loss) for one in told)


def at_its_floor(rank: int, spec: RunSpec) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    trainer = trainer_of(spec)
    before = state_of(trainer)
    with pytest.raises(NotFinite) as caught:
        trained(trainer, [Overflow(trainer, *range(10))])
    return str(caught.value), before, state_of(trainer)


@pytest.mark.parametrize("plan", [{"data": 2}, {"pipeline": 2, "schedule": "zb-h2", "post_validation": True}], ids=str)
def test_a_scale_at_its_floor_ends_the_run_with_names(plan: dict[str, Any]) -> None:
    spec = fp16(plan, scale={"initial": 4, "hysteresis": 1, "floor": 2})
    for message, before, after in run_ranks(at_its_floor, 2, spec):
        assert message.startswith("step 2: ") and f"NaN or Inf in gradients of {TENSOR} (" in message
        assert "the loss scale was 2, which is not above its floor (loss_scale.floor)" in message
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "loss_scale")


# --- the scale is state ---


def looped(rank: int, spec: RunSpec, folder: Path, kill: int | None, from_step: int | None) -> Any:
    trainer, stream = trainer_of(spec), open_stream(spec, "train")
    checkpointer = Checkpointer(folder / "checkpoints", keep=20)
    source = None if from_step is None else Source(from_step, Tier.STORE)
    position = restore(trainer, checkpointer, stream, group=None, warn=print, source=source)
    loop = Loop(
        trainer,
        stream,
        checkpointer,
        position,
        validator=None,
        yardstick=Yardstick(1.0, None, ""),
        log=EventLog(folder) if rank == 0 else None,
        heartbeat=Heartbeat.find(),
        step_hooks=[Overflow(trainer, *BAD)],
    )

    def after_step(done: int) -> None:
        if done == kill:
            loop.checkpointer.wait()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    assert loop.run(stop=False, after_step=after_step) == "finished"
    return state_of(trainer), loop.position, trainer.state.scale


@sampled(2, together=True)
def test_scale_and_counters_hold_over_kill_rewind_and_a_change_of_plan(tmp_path: Path) -> None:
    """There are seven updates in nine steps. More steps overflow than stability.skips would allow to skip."""
    (tmp_path / "data").mkdir()
    data = small_data(tmp_path / "data")
    rest: dict[str, Any] = {
        "model": {"layers": 2, "vocab": VOCAB},
        "data": {"path": data},
        "checkpoint": {"every": 1, "keep": 20, "asynchronous": False},
        "stability": {"skips": 1},
        "scale": {"growth_interval": 3, "hysteresis": 1},
        "train": {"steps": 7},
    }
    spec = fp16({"data": 2, "zero": 1}, **rest)

    def train(spec: RunSpec, folder: Path, *, kill: int | None = None, from_step: int | None = None) -> Any:
        folder.mkdir(exist_ok=True)
        return run_ranks(looped, spec.plan.ranks, spec, folder, kill, from_step)[0]

    straight, position, scale = train(spec, tmp_path / "straight")
    assert (position.step, position.updates) == (9, 7)
    told = [*read(tmp_path / "straight")]
    assert [one.scale for one in of_kind(told, Step)] == [1024, 512, 512, 256, 256, 256, 512]
    (first, second) = of_kind(told, Skipped)
    assert (first.step, first.part, first.tensor, first.scale_before, first.scale_after) == (2, "blocks.1", TENSOR, 1024, 512)
    assert (second.step, second.left) == (5, 1) and "stability.skips" not in second.words
    assert scale is not None and (scale.value, scale.good, scale.overflows) == (512, 1, 2)

    with pytest.raises(RuntimeError):
        train(spec, tmp_path / "killed", kill=5)  # right after an overflow
    ways: list[Callable[[], Any]] = [
        lambda: train(spec, tmp_path / "killed"),
        lambda: train(spec, tmp_path / "straight", from_step=3),
    ]
    for again in ways:
        state, found, there = again()
        assert (found, there) == (position, scale)
        assert all(torch.equal(state[name], tensor) for name, tensor in straight.items())
    state, found, there = train(fp16({"tensor": 2}, **rest), tmp_path / "killed", from_step=3)
    assert (found, there) == (position, scale)


class Flip(StepHook):
    """Flips a bit of the loss scale's tensor after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer, step: int) -> None:
        if step == self.step:
            trainer.state.scaling["loss_scale"][:1].view(torch.int32).bitwise_xor_(1 << 20)


def guarded(rank: int, spec: RunSpec, root: Path) -> Any:
    trainer, observed = trainer_of(spec), list[Observation]()
    rank_info = RankInfo(rank, 2, ("n0", "n1"), root, key=KEY)
    memory = Memory(trainer.state.shares(), rank_info=rank_info, keep=3)
    memory.join(1, group=everyone())
    guard = StateGuard(trainer, rank_info=rank_info, read=lambda step, data_rank: [], memory=memory, report=observed.append)
    guard.begin(0, 0)
    step_hooks = [Overflow(trainer, *BAD), guard]
    stepper = stepper_of(trainer, Attendants(step_hooks, guard))
    for step in range(6):
        Attendants(step_hooks).notify("before_step", trainer, step)
        stepper.step(microbatches(trainer, step), step=step)
        stepper.settle()
        guard.copy(step + 1, 0)
    ended = trainer.state.scale
    guard.close()
    memory.restore(Source(5, Tier.MEMORY))
    trainer.state.read_scale()
    return observed, ended, trainer.state.scale


@pytest.mark.parametrize("plan", [{"data": 2}, {"pipeline": 2, "schedule": "zb-h2", "post_validation": True}], ids=str)
def test_guards_and_copies_go_with_the_scale(plan: dict[str, Any], tmp_path: Path) -> None:
    """A guard does not take an overflow for corruption. A copy in memory holds the scale and its counters."""
    for observed, ended, restored in run_ranks(guarded, 2, fp16(plan, scale=MOVING), tmp_path):
        assert not observed
        assert (ended, restored) == (Scale(9, good=1, spent=1, overflows=2), Scale(9, spent=1, overflows=2))


def test_a_scale_that_was_altered_is_found() -> None:
    (observed,) = run_ranks(altered, 1, fp16({}))
    (observation,) = observed
    assert isinstance(observation, StateCorrupt) and (observation.rank, observation.where, observation.step) == (0, "at rest", 3)


def altered(rank: int, spec: RunSpec) -> list[Observation]:
    trainer, observed = trainer_of(spec), list[Observation]()
    guard = StateGuard(
        trainer, rank_info=RankInfo(0, 1, ("n0",), None, key=KEY), read=lambda step, data_rank: [], report=observed.append
    )
    guard.begin(0, 0)
    with pytest.raises(Reported):
        trained(trainer, [Flip(2), guard])
    return observed
