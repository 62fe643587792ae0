"""A rank's findings about its own state and gradients, the ranks that it blames, and no findings if the check is off."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.checkpoint.memory import Memory
from megalith.fleet.observations import GradientWrong, Nonfinite, Observation, StateCorrupt
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.report import Reported
from megalith.parallel.gradients import NotFinite
from megalith.prove.parity import RandomText
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.batches import indices
from megalith.train.guard import StateGuard
from megalith.train.loop import stepper_of
from megalith.train.step_hooks import Attendants, StepHook
from tests.full import sampled
from tests.keys import KEY
from tests.parallel.running import trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

pytestmark = pytest.mark.slow

STEPS = 4
BAD = 2  # the step with the fault
Moment = Callable[[Trainer, int], None]


class Fault:
    """Does one act at one point of step BAD."""

    def __init__(self, **acts: Moment) -> None:
        self.acts = acts

    def _come(self, moment: str, trainer: Trainer, step: int) -> None:
        if step == BAD and moment in self.acts:
            self.acts[moment](trainer, step)

    def before_step(self, trainer: Trainer, step: int) -> None:
        self._come("before_step", trainer, step)

    def after_reduction(self, trainer: Trainer, step: int, nll: torch.Tensor) -> None:
        self._come("after_reduction", trainer, step)

    def before_update(self, trainer: Trainer, step: int) -> None:
        self._come("before_update", trainer, step)

    def after_update(self, trainer: Trainer, step: int) -> None:
        self._come("after_update", trainer, step)

    def after_step(self, trainer: Trainer, step: int) -> None:
        self._come("after_step", trainer, step)


def read_of(trainer: Trainer, step: int, data_rank: int) -> list[Any]:
    spec, text = trainer.spec, RandomText(trainer.spec)
    return [text.batch(part) for part in indices(spec, first=step * spec.train.global_batch, data_rank=data_rank)]


def flip(tensor: torch.Tensor, at: int = 3) -> None:
    """Flip one bit of a mantissa."""
    tensor.view(-1)[at : at + 1].view(torch.int32).bitwise_xor_(1 << 20)


def spoil(trainer: Trainer, amount: float, *, times: int, after: int = 0) -> None:
    """Add to one element of this rank's own gradient before it is reduced: `times` times, or always (-1), after the first `after`
    times."""
    parameter = next(p for p in trainer.runners[max(trainer.runners)].stage.parameters() if p.requires_grad)
    left, skip = [times], [after]

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if skip[0]:
            skip[0] -= 1
            return grad
        if not left[0]:
            return grad
        left[0] -= 1
        spoilt = grad.clone()
        spoilt.view(-1)[0] += amount
        return spoilt

    parameter.register_hook(hook)


class Outcome:
    """The outcome on one rank: its reports, its reason to end, and its final bits."""

    def __init__(self, observed: list[Observation], ended: str, bits: dict[str, torch.Tensor]) -> None:
        self.observed, self.ended, self.bits = observed, ended, bits


def _train(
    rank: int, run: dict[str, Any], fault: Callable[[int], StepHook | None], root: Path | None, raises: bool = False
) -> Outcome:
    trainer = trainer_of(tiny_run(**run))
    world = trainer.spec.plan.ranks
    rank_info, observed = RankInfo(rank, world, tuple(f"n{r}" for r in range(world)), root, key=KEY), list[Observation]()
    memory = Memory(trainer.state.shares(), rank_info=rank_info, pinned=True) if root else None
    if memory and world > 1 and dist.group.WORLD:
        memory.join(1, group=dist.group.WORLD)
    guard = StateGuard(trainer, rank_info=rank_info, read=partial(read_of, trainer), memory=memory, report=observed.append)
    guard.begin(0, 0)
    step_hooks = [w for w in (fault(rank), guard) if w is not None]
    stepper, ended = stepper_of(trainer, Attendants(step_hooks, guard)), "finished"
    try:
        for step in range(STEPS):
            Attendants(step_hooks).notify("before_step", trainer, step)
            stepper.step(read_of(trainer, step, trainer.groups.coordinates["data"]), step=step)
            if guard.due(step + 1):
                guard.copy(step + 1, 0)
        stepper.settle()
        guard.close()
    except (Reported, NotFinite) as error:
        if raises:
            raise
        ended = f"{type(error).__name__}: {error}"
    return Outcome(observed, ended, {name: share.clone() for name, share in trainer.state.shares().items()})


def train(
    run: dict[str, Any], fault: Callable[[int], StepHook | None] = lambda rank: None, root: Path | None = None
) -> list[Outcome]:
    return run_ranks(_train, tiny_run(**run).plan.ranks, run, fault, root)


def alike(one: list[Outcome], other: list[Outcome]) -> bool:
    return all(torch.equal(a.bits[name], b.bits[name]) for a, b in zip(one, other, strict=True) for name in a.bits)


def only(rank: int, **acts: Moment) -> Callable[[int], StepHook | None]:
    return lambda here: Fault(**acts) if here == rank else None


# --- bits that flip between steps ---

ALONE: dict[str, Any] = {"plan": {}}


ON_HOST: dict[str, Any] = {"plan": {"state": {"optimizer": "host"}}}
"""The next forward hides updates, and their thread computes the digest."""


@pytest.mark.parametrize(
    ("run", "which"),
    [*((ALONE, which) for which in ("weights", "moments.first", "moments.second")), (ON_HOST, "moments.second")],
    ids=str,
)
def test_a_bit_flipped_at_rest_is_found_and_blamed(run: dict[str, Any], which: str) -> None:
    def act(trainer: Trainer, step: int) -> None:
        flip(next(share for name, share in trainer.state.shares().items() if name.startswith(which)))

    (found,) = train(run, only(0, after_step=act))
    (observation,) = found.observed
    assert isinstance(observation, StateCorrupt) and (
        observation.rank,
        observation.node,
        observation.where,
        observation.step,
    ) == (0, "n0", "at rest", BAD + 1)
    assert found.ended.startswith("Reported")


def _merged(rank: int, flips: bool) -> list[Observation]:
    """Merge twice, and return the reports. `flips`: in between, a bit of a replica's anchor flips."""
    trainer = trainer_of(tiny_run(plan={"data": 2, "zero": 0}, train={"global_batch": 4}))
    anchor, observed = torch.ones(64), list[Observation]()
    rank_info = RankInfo(rank, 2, ("n0", "n1"), None, key=KEY)
    read = partial(read_of, trainer)
    guard = StateGuard(trainer, rank_info=rank_info, read=read, report=observed.append, merged=[anchor])
    guard.begin(0, 0)
    with contextlib.suppress(Reported):
        for step in range(3):
            guard.before_merge(step)
            anchor.mul_(1.5)
            next(iter(trainer.state.shares().values())).mul_(0.5)
            if flips and rank == 1 and step == 0:
                flip(anchor)
            guard.adopt(step + 1)
    return observed


def _altered_anchor(rank: int) -> Observation:
    trainer, anchor, observed = trainer_of(tiny_run()), torch.ones(64), list[Observation]()
    rank_info = RankInfo(rank, 1, ("n0",), None, key=KEY)
    guard = StateGuard(trainer, rank_info=rank_info, read=partial(read_of, trainer), report=observed.append, merged=[anchor])
    guard.begin(0, 0)
    guard.check_all(0)
    flip(anchor)
    guard.check_state(0)
    with pytest.raises(Reported, match="state kept for merges"):
        guard.check_all(0)
    return observed[0]


def test_a_bit_of_an_anchor_that_flips_is_found_before_a_merge_or_a_save() -> None:
    (observation,) = run_ranks(_altered_anchor, 1)
    assert isinstance(observation, StateCorrupt) and (observation.where, observation.node) == ("at rest", "n0")


def test_a_merge_changes_the_state_and_replicas_must_agree_about_it() -> None:
    """The anchors of two data ranks differ after a merge, which one of the two reports."""
    assert run_ranks(_merged, 2, False) == [[], []]
    (observation,), nothing = run_ranks(_merged, 2, True)
    assert isinstance(observation, GradientWrong) and observation.suspects == ("n0", "n1") and not nothing


# --- NaN ---

PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 3, "microbatch": 2},
    {"pipeline": 2, "schedule": "zb-h2", "post_validation": True},
]


@sampled(4, together=True)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_nan_that_does_not_come_again_leaves_no_trace(plan: dict[str, Any]) -> None:
    run = {"plan": plan, "model": {"preset": "deepseek-tiny"}} if plan.get("data") else {"plan": plan}
    clean = train(run)
    found = train(run, only(1, before_step=lambda trainer, step: spoil(trainer, torch.nan, times=1)))
    assert [outcome.ended for outcome in found] == ["finished"] * 2
    assert alike(clean, found)
    (observation,) = [observation for outcome in found for observation in outcome.observed]
    assert isinstance(observation, Nonfinite) and (observation.rank, observation.step, observation.elsewhere) == (
        1,
        BAD,
        "not asked",
    )


def test_a_nan_that_stays_is_blamed_on_the_rank_unless_another_replica_gets_it_too() -> None:
    run = {"plan": {"data": 2, "zero": 1}}
    one = train(run, only(1, before_step=lambda trainer, step: spoil(trainer, torch.nan, times=-1)))
    assert all(outcome.ended.startswith(f"NotFinite: step {BAD + 1}: ") for outcome in one), [o.ended for o in one]
    assert [observation.elsewhere for observation in one[1].observed if isinstance(observation, Nonfinite)] == [
        "not asked",
        "clean",
    ]
    assert one[1].observed[-1].rank == 1 and one[0].observed == []  # pyright: ignore[reportAttributeAccessIssue]
    both = train(run, lambda rank: Fault(before_step=lambda trainer, step: spoil(trainer, torch.nan, times=-1)))
    assert [observation.elsewhere for o in both for observation in o.observed if isinstance(observation, Nonfinite)] == [
        "not asked",
        "reproduced",
    ]


# --- wrong gradients ---

REPLICAS: dict[str, Any] = {"plan": {"data": 2, "zero": 2, "microbatch": 2}, "fleet": {"verify_every": 1, "verify": "all"}}


def test_an_error_that_came_once_is_found_with_verify_all_and_blamed_by_a_further_computation() -> None:
    fault = only(1, before_step=lambda trainer, step: spoil(trainer, 0.37, times=1))
    found = train(REPLICAS, fault)
    assert all(outcome.ended.startswith("Reported: step 3: ranks 1 ") for outcome in found), found[0].ended
    observed = [observation for outcome in found for observation in outcome.observed]
    assert [
        (type(observation), observation.suspects, observation.good_step)
        for observation in observed
        if isinstance(observation, GradientWrong)
    ] == [(GradientWrong, ("n1",), BAD - 1)]


UNSEEN = [(3, "all"), (1, "one")]


@pytest.mark.parametrize(("every", "verify"), UNSEEN, ids=["another step is verified", "another computation is"])
def test_an_error_that_came_once_elsewhere_than_what_is_verified_is_never_found(every: int, verify: str) -> None:
    """So with `verify = "all"` a one-off error at any step is found with probability 1 / verify_every."""
    assert BAD % 3
    run = REPLICAS | {"fleet": {"verify_every": every, "verify": verify}}
    found = train(run, only(1, before_step=lambda trainer, step: spoil(trainer, 0.37, times=1)))
    assert [(outcome.observed, outcome.ended) for outcome in found] == [([], "finished")] * 2
    assert not alike(train(run), found), "it stays in the weights"


def test_an_error_that_stays_is_found_with_one_microbatch_and_of_three_replicas_the_wrong_one_is_named() -> None:
    run = {"plan": {"data": 3, "zero": 0}, "train": {"global_batch": 6, "steps": 3, "seq_len": 32, "precision": "fp32"}}
    fault = only(1, before_step=lambda trainer, step: spoil(trainer, 0.37, times=-1))
    found = train(run | {"fleet": {"verify_every": 2}}, fault)
    (observation,) = [observation for outcome in found for observation in outcome.observed]
    assert isinstance(observation, GradientWrong) and observation.suspects == ("n1",)


@pytest.mark.parametrize("times", [1, -1], ids=["once", "in the same way each time"])
def test_without_another_replica_a_rank_repeats_itself_which_finds_only_what_comes_once(times: int) -> None:
    """`megalith check` says so: tests/check/test_fleet.py."""
    run = {"plan": {}, "fleet": {"verify_every": 1, "verify": "all"}}
    (found,) = train(run, only(0, before_step=lambda trainer, step: spoil(trainer, 0.37, times=times)))
    if times < 0:
        assert (found.observed, found.ended) == ([], "finished")
        return
    (observation,) = found.observed
    assert isinstance(observation, GradientWrong) and (observation.suspects, observation.good_step) == (("n0",), BAD - 1)
    assert found.ended == f"Reported: step {BAD + 1}: ranks 0 did not get the same gradients twice"


VERIFIED: list[tuple[str, dict[str, Any]]] = [
    ("one", {"plan": {"data": 2, "zero": 3, "pipeline": 2, "schedule": "zb-h1"}}),
    ("all", {"plan": {"data": 2, "expert": 2, "tensor": 2, "microbatch": 2}, "model": {"preset": "deepseek-tiny"}}),
]


@pytest.mark.parametrize(("verify", "run"), VERIFIED, ids=str)
@sampled(4, together=True)
def test_verification_leaves_no_trace_and_gives_no_false_alarm(verify: str, run: dict[str, Any], tmp_path: Path) -> None:
    clean = train(run | {"fleet": {"digest": False}})
    found = train(run | {"fleet": {"verify_every": 2, "verify": verify}}, root=tmp_path)
    assert [(outcome.observed, outcome.ended) for outcome in found] == [([], "finished")] * len(found), found[0].ended
    assert alike(clean, found)


AWAY: list[tuple[int, dict[str, Any]]] = [
    (3, {"optimizer": "host"}),
    (0, {"optimizer": "host", "share": 0.5}),
    (3, {"optimizer": "host", "weights": "host", "share": 0.5}),
    (3, {"optimizer": "disk"}),
]


@sampled(4, together=True)
@pytest.mark.parametrize(("zero", "place"), AWAY, ids=str)
def test_verification_gives_no_false_alarm_with_state_elsewhere(zero: int, place: dict[str, Any], tmp_path: Path) -> None:
    """The compute weights are in bf16, and the update repeated from a copy makes none."""
    plan = {"data": 2, "zero": zero, "state": place}
    train_bf16 = {"global_batch": 4, "steps": 3, "seq_len": 32, "precision": "bf16"}
    root = None if place["optimizer"] == "disk" else tmp_path  # copies would hold all the state that is on disk
    found = train({"plan": plan, "train": train_bf16, "fleet": {"verify_every": 1}}, root=root)
    assert [(outcome.observed, outcome.ended) for outcome in found] == [([], "finished")] * 2, found[0].ended


def _partly_away(rank: int, spec: RunSpec) -> tuple[bool, bool]:
    """Train with digests; return whether the rank has state off the device, and whether it updates ahead."""
    trainer = trainer_of(spec)
    found, everyone = (trainer.state.home is not None, trainer.ahead is not None), [False] * 4
    dist.all_gather_object(everyone, found[1])
    if not all(everyone):
        return found  # the ranks would exchange digests in different orders, and hang
    guard = StateGuard(trainer, rank_info=RankInfo(rank, 4, ("n",) * 4, None, key=KEY), read=partial(read_of, trainer))
    guard.begin(0, 0)
    stepper = stepper_of(trainer, Attendants([guard], guard))
    for step in range(3):
        guard.before_step(trainer, step)
        stepper.step(read_of(trainer, step, trainer.groups.coordinates["data"]), step=step)
    stepper.settle()
    return found


def test_ranks_without_state_off_the_device_exchange_digests_when_the_others_do() -> None:
    """The first stage holds only the embedding, which is larger than the share that leaves the device."""
    plan = {"pipeline": 2, "data": 2, "layers": [0, 2], "state": {"optimizer": "host", "share": 0.7}}
    spec = tiny_run(plan=plan, model={"layers": 2}, train={"global_batch": 4, "seq_len": 32, "steps": 3})
    found = run_ranks(_partly_away, 4, spec)
    assert sorted(found) == [(False, True), (False, True), (True, True), (True, True)]


def _after_a_replacement(rank: int, run: dict[str, Any], root: Path) -> list[Observation]:
    """Rank 0's node is a spare that has just joined. Rank 1 holds the copy of step 1, the last verified step. The run resumes from 3."""
    trainer, rank_info, observed = (
        trainer_of(tiny_run(**run)),
        RankInfo(rank, 2, ("n0", "n1"), root, key=KEY),
        list[Observation](),
    )
    memory = Memory(trainer.state.shares(), rank_info=rank_info, pinned=True)
    if rank == 1:
        memory.copy(1, 0, known=None, to_disk=False)
        memory.pin()
    guard = StateGuard(trainer, rank_info=rank_info, read=partial(read_of, trainer), memory=memory, report=observed.append)
    guard.begin(3, 0)
    if rank == 1:
        spoil(trainer, 0.37, times=-1)
    stepper = stepper_of(trainer, Attendants([guard], guard))
    guard.before_step(trainer, 4)
    with pytest.raises(Reported):
        stepper.step(read_of(trainer, 4, trainer.groups.coordinates["data"]), step=4)
    return observed


def test_what_was_verified_last_is_what_all_ranks_know_of_however_new_their_nodes_are(tmp_path: Path) -> None:
    """A spare restores an unverified state, whose last steps may contain the error found now."""
    run = REPLICAS | {"fleet": {"verify_every": 4, "verify": "all"}}
    (observation,) = [observation for observed in run_ranks(_after_a_replacement, 2, run, tmp_path) for observation in observed]
    assert isinstance(observation, GradientWrong) and observation.good_step == 1


# --- updates and replicas ---


def flip_moment(trainer: Trainer, step: int) -> None:
    """The error comes before the digest is taken, so nothing changes between steps."""
    flip(next(iter(trainer.state.shares("optimizer").values())))


def test_a_wrong_update_is_found_by_making_it_again_from_the_copy(tmp_path: Path) -> None:
    (found,) = train({"plan": {}, "fleet": {"verify_every": 2}}, only(0, after_update=flip_moment), root=tmp_path)
    (observation,) = found.observed
    assert isinstance(observation, StateCorrupt) and (observation.rank, observation.where, observation.step) == (0, "update", BAD)


@pytest.mark.parametrize("place", [{"optimizer": "device"}, {"optimizer": "host"}], ids=str)
def test_the_buddy_that_holds_the_copy_makes_the_update_again(place: dict[str, Any], tmp_path: Path) -> None:
    """The state is sharded, so no replica has it. The buddy ends; a supervisor would end the others."""
    run = {"plan": {"data": 2, "zero": 1, "state": place}, "fleet": {"verify_every": 2}}
    with pytest.raises(RuntimeError, match=rf"rank 1 of 2 failed first(.|\n)*rank 0's update in step {BAD + 1} differs"):
        run_ranks(_train, 2, run, only(0, after_update=flip_moment), tmp_path, True)


def test_of_three_replicas_the_one_that_differs_is_blamed() -> None:
    def act(trainer: Trainer, step: int) -> None:
        flip(trainer.state.shares("optimizer")["moments.first.embedding.weight"])

    run = {"plan": {"data": 3, "zero": 0}, "train": {"global_batch": 6, "steps": 3, "seq_len": 32, "precision": "fp32"}}
    found = train(run, only(2, after_update=act))
    (observation,) = [observation for outcome in found for observation in outcome.observed]
    assert isinstance(observation, StateCorrupt) and (observation.rank, observation.where, observation.step) == (
        2,
        "replica",
        BAD + 1,
    )
