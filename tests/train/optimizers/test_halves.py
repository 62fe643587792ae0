"""Master weights in two halves: with 16 bits they equal fp32, their bits do not depend on plan and place, and checkpoints have one form."""

import os
import signal
from collections.abc import Callable
from itertools import count as count_up
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.checkpointer import Checkpointer, SaveResult
from megalith.checkpoint.shares import as_tensor, shares
from megalith.cost.predicted import predict, workload_of
from megalith.events import RunStarted, of_kind, read
from megalith.kernels.halves import split
from megalith.parallel.data import Weight, local
from megalith.planner.compared import compare
from megalith.prove.axes import ParityCase
from megalith.prove.dryrun import count, single_documents
from megalith.prove.parity import _together, shrink
from megalith.prove.prove import prove
from megalith.spec.run import RunSpec
from megalith.spec.state import PIECES
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.loop import stepper_of
from megalith.train.optimizers.small import PackedState
from megalith.train.received import receive
from tests.full import FULL, sampled
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.prove.dry import dry
from tests.ranks import run_ranks
from tests.runs import assert_same_bits, final_state, finish, prepare_text, start, train
from tests.specs import brief_run, tiny_run
from tests.train.optimizers.test_plans import DENSE, EXPERTS, set_gradients, spec_of

Held = dict[str, Tensor]
BF16 = {"precision": "bf16"}
HALF, DISK = {"optimizer": "host", "share": 0.5}, {"optimizer": "disk"}


def _state(trainer: Trainer) -> Held:
    """Return this rank's shares in the form of a checkpoint."""
    return {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}


def _train(trainer: Trainer, first: int = 0, steps: int = 3) -> list[float]:
    stepper, told = stepper_of(trainer), []
    for step in range(first, first + steps):
        told += stepper.step(microbatches(trainer, step), step=step)
    return [each.loss for each in (*told, *stepper.settle())]


def _trained(rank: int, specs: list[RunSpec]) -> list[tuple[list[float], Held]]:
    """Return losses and state after some steps of each run. fp32 master weights are rounded like the halves."""
    found = []
    for spec in specs:
        with pytest.MonkeyPatch.context() as patch:
            if spec.optimizer.master == "fp32":
                patch.setattr(Weight, "write", lambda self, into: into.copy_(split(local(self.master), 16)[0]))
            trainer = trainer_of(spec)
            found.append((_train(trainer), _state(trainer)))
    return found


def _assert_same(found: list[tuple[list[float], Held]]) -> None:
    (losses, state), *others = found
    for other, held in others:
        assert other == losses and held.keys() == state.keys()
        assert not [key for key in state if not torch.equal(held[key], state[key])]


def _with(spec: RunSpec, *, state: dict[str, Any] | None = None, **optimizer: Any) -> RunSpec:
    plan = spec.plan.model_validate(spec.plan.model_dump() | {"state": state or {}})
    return spec.model_copy(update={"plan": plan, "optimizer": spec.optimizer.model_copy(update=optimizer)})


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"kind": "adamw"}),
    ({"data": 2, "zero": 1}, {"tied": True}, {"kind": "adamw", "moments": "fp8", "moment_block": 4, "moment_least": 0}),
    ({"data": 2, "zero": 2, "post_validation": True, "pipeline": 2, "schedule": "zb-h2"}, {}, {"kind": "adamw"}),
]
CASES += [
    ({"data": 2, "zero": 3}, {}, {"kind": "muon"}),
    ({"data": 2, "expert": 2, "zero": 3}, {"preset": "deepseek-tiny"}, {"kind": "lamb"}),
    ({"tensor": 2, "data": 2, "zero": 2}, {}, {"kind": "sgd"}),
    ({"data": 2, "zero": 0}, {}, {"kind": "adafactor"}),
    ({"data": 4, "replicate": 2}, {}, {"kind": "lion"}),
    ({"pipeline": 2, "data": 2, "expert": 2, "schedule": "dualpipe"}, {"preset": "deepseek-tiny"}, {"kind": "adamw"}),
] * FULL


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "model", "optimizer"), CASES, ids=str)
@sampled(1)
def test_sixteen_bits_are_the_run_in_fp32_that_rounds_so(
    plan: dict[str, Any], model: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """This holds wherever the lower half is stored. Clipping is active."""
    spec = brief_run(plan=plan, model=model, train=BF16, optimizer={"clip": 0.05, **optimizer})
    specs = [spec, *(_with(spec, state=place, master="split16") for place in ({}, HALF, DISK))]
    for found in run_ranks(_trained, spec.plan.ranks, specs):
        _assert_same(found)


@pytest.mark.slow
def test_eight_bits_are_the_same_wherever_they_are() -> None:
    """The bits must differ from those with 16 bits, or nothing was rounded here."""
    spec = brief_run(plan={"data": 2, "zero": 1}, train=BF16, optimizer={"clip": 0.05})
    specs = [_with(spec, state=place, master="split8") for place in ({}, HALF, DISK)]
    for *found, exact in run_ranks(_trained, 2, [*specs, _with(spec, master="split16")]):
        _assert_same(found)
        name = "weights.blocks.0.mlp.up.weight"
        assert not torch.equal(found[0][1][name], exact[1][name])
        assert torch.allclose(found[0][1][name], exact[1][name], rtol=1e-3, atol=1e-3)
        assert not bool((found[0][1][name].view(torch.int32) & 0xFF).any()), "24 bits of each"


WIDE = {"layers": 1, "dim": 128, "heads": 34, "kv_heads": 34, "head_dim": 64, "ffn": 64}
"""A model whose query weights have more than `PIECES["cpu"]` numbers."""
NEAR = 0.9997
"""A factor that leaves most bf16 weights unchanged."""


def _clipped(rank: int, specs: list[RunSpec]) -> list[Held]:
    """Return this rank's state after an update, which scales each head by a different factor if the run clips heads."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        if trainer.heads is not None:
            factors = trainer.heads.factors
            trainer.heads.factors = torch.linspace(NEAR, 1.0, factors.numel()).view_as(factors)
        set_gradients(trainer, 0)
        trainer.update()
        found.append(_state(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"kind": "adamw"}, *[{"kind": "muon"}] * FULL], ids=str)
def test_heads_are_scaled_in_all_bits_of_the_master_weights(optimizer: dict[str, Any]) -> None:
    spec = brief_run(plan={}, model=WIDE, train=BF16, optimizer={"qk_clip": 1.0, **optimizer})
    halves = [_with(spec, state=place, master="split16") for place in ({}, HALF, DISK)]
    others = [_with(spec, qk_clip=0.0), *(_with(spec, state=place, master="split8") for place in ({}, DISK))]
    name = "weights.blocks.0.attention.q.weight"
    ((exact, *found, unscaled, eight, on_disk),) = run_ranks(_clipped, 1, [spec, *halves, *others])
    assert exact[name].numel() > PIECES["cpu"] and not torch.equal(exact[name], unscaled[name])
    assert all(torch.equal(held[key], exact[key]) for held in found for key in exact)
    assert torch.allclose(eight[name], exact[name], rtol=2**-13, atol=2**-19), "24 bits of each, rounded twice"
    assert not torch.equal(eight[name], exact[name]) and torch.equal(eight[name], on_disk[name])


VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", "moments": "fp8", "moment_block": 4, "moment_least": 0, "master": "split8"},
    "lion": {"kind": "lion", "master": "split8"},
    "muon": {"kind": "muon", "master": "split16"},
}


def _updated(rank: int, specs: list[RunSpec]) -> list[Held]:
    """Return the whole state after two updates from the same gradients, on the first rank."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        for step in range(2):
            set_gradients(trainer, step)
            trainer.update()
            trainer.state.drop_gradients()
        found.append(_together(trainer.state.laid(), trainer))
    return found


@pytest.mark.slow
@sampled(3, together=True)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (DENSE, {"data": 3, "zero": 1}),
        (DENSE, {"tensor": 2, "data": 2, "zero": 3, "state": DISK}),
        *[(EXPERTS, {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2})] * FULL,
    ],
    ids=str,
)
def test_a_plan_changes_no_bit_of_an_update(model: dict[str, Any], plan: dict[str, Any]) -> None:
    def specs(plan: dict[str, Any]) -> list[RunSpec]:
        made = [spec_of(model, plan, **optimizer) for optimizer in VARIANTS.values()]
        return [each.model_copy(update={"train": each.train.model_copy(update=BF16)}) for each in made]

    (expected,) = run_ranks(_updated, 1, specs({}))
    made = specs(plan)
    for name, state, alone in zip(VARIANTS, run_ranks(_updated, made[0].plan.ranks, made)[0], expected, strict=True):
        matrices = [
            key for key in alone if alone[key].dim() > 1 and "embedding" not in key
        ]  # moments of other optimizers stay wide: see test_small
        assert matrices and not [key for key in matrices if not torch.equal(state[key], alone[key])], name


@pytest.mark.slow
@pytest.mark.parametrize("master", ["split16", "split8"])
def test_a_plan_with_halves_trains_like_one_process(master: str) -> None:
    plan = {"data": 2, "tensor": 2, "zero": 2, "state": HALF}
    spec = shrink(tiny_run(plan=plan, train={"global_batch": 8, **BF16}, optimizer={"master": master}), steps=3)
    proof = prove(ParityCase((), spec.model_copy(update={"name": "tiny"})), references={})
    assert proof.outcome == "equal", proof


# --- checkpoints ---

CHAIN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {}),
    ("split16", {"data": 2, "zero": 3}),
    ("fp32", {"tensor": 2}),
    ("split8", {"data": 2, "zero": 1, "state": DISK}),
    ("split8", {"tensor": 2, "data": 2}),
    ("fp32", {}),
)
"""Forms and plans of runs that each resume from the one before."""


def _resumed(rank: int, folder: Path, number: int) -> tuple[Held, Held, list[str]]:
    """One run of the chain: load, update, save. Return, on the first rank, the weights as loaded and as saved, and the warnings."""
    master, plan = CHAIN[number]
    made = spec_of(DENSE, plan, master=master)
    spec = made.model_copy(update={"train": made.train.model_copy(update=BF16)})
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU)
    checkpointer, warned = Checkpointer(folder), list[str]()
    if number:
        assert receive(trainer, checkpointer.load, warned.append) is not None
        trainer.state.loaded()
    loaded = _together(trainer.state.laid("weights"), trainer)
    trainer.state.updates = number
    set_gradients(trainer, number)
    trainer.update()
    described: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "position": {"updates": number + 1}}
    checkpointer.save(number + 1, trainer.state.laid(), described, asynchronous=True)
    saved = _together(trainer.state.laid("weights"), trainer)
    with torch.no_grad():
        for share in trainer.state.shares("weights").values():
            share.zero_()  # while the copy is written, if the state is in memory
    assert [type(outcome) for outcome in checkpointer.wait()] == [SaveResult]
    return loaded, saved, warned


@pytest.mark.slow
def test_a_checkpoint_moves_between_forms_under_any_plan(tmp_path: Path) -> None:
    told, saved = list[list[str]](), Held()
    for number, (master, plan) in enumerate(CHAIN):
        before = saved
        loaded, saved, warned = run_ranks(_resumed, spec_of(DENSE, plan).plan.ranks, tmp_path, number)[0]
        told.append(warned)
        assert all(each.dtype == torch.float32 for each in saved.values())
        if number and master == "split8" and CHAIN[number - 1][0] != master:
            matrices = [key for key in before if before[key].dim() > 1]
            assert all(float(((loaded[key] - before[key]) / before[key]).abs().nan_to_num().max()) <= 2**-16 for key in matrices)
            assert not all(torch.equal(loaded[key], before[key]) for key in matrices)
        elif number:
            assert all(torch.equal(loaded[key], before[key]) for key in before)
    assert [len(each) for each in told] == [0, 1, 1, 1, 0, 1]
    assert told[1] == [
        "optimizer.master was fp32 when step 1 was saved and is now split16: the values of the master weights do not change"
    ]
    assert told[3] == [
        "optimizer.master was fp32 when step 3 was saved and is now split8: the master weights are rounded to 24 bits"
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
@pytest.mark.parametrize("place", [DISK, *[{}] * FULL], ids=str)
def test_kill_9_in_the_midst_of_an_update_changes_no_bit(place: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """A rank dies when half of its weights are updated: at twenty points in `make test-full`, otherwise at one."""
    spec = tiny_run(
        model={"layers": 2, "vocab": 264},
        plan={"data": 2, "zero": 1, "state": place},
        data={"path": str(data)},
        train={"steps": 6, "global_batch": 2, "seq_len": 32, **BF16},
        checkpoint={"every": 2},
        optimizer={"master": "split8"},
    )
    train(spec, tmp_path / "whole")
    folder = tmp_path / "killed"
    train(spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 2})}), folder)
    moments = range(1, 41, 2) if FULL else (23,)  # the next checkpoint comes after 42 calls
    for at in moments:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedState, "_split", _dying(1, at=at))
            assert finish(start(spec, folder))[1] == -signal.SIGKILL
    train(spec, folder)
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert len([*of_kind(read(folder), RunStarted)]) == len(moments) + 2


def _dying(rank: int, *, at: int) -> Callable[..., None]:
    """A `PackedState._split` that kills the rank at its `at`-th call."""
    whole, calls = PackedState._split, count_up()

    def split_up(self: PackedState, *tensors: Tensor) -> None:
        if os.environ.get("RANK") == str(rank) and next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *tensors)

    return split_up


# --- bytes ---

SIZES = {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 1024}


def _bytes(rank: int, spec: RunSpec) -> tuple[dict[str, int], int, int]:
    """Return bytes by category, and the numbers of elements of matrices and of vectors on this rank."""
    trainer = trainer_of(spec)
    numbers = {name: local(parameter).numel() for name, parameter in trainer.parameters.items()}
    vectors = sum(size for name, size in numbers.items() if trainer.parameters[name].dim() < 2)
    return trainer.state.bytes(), sum(numbers.values()) - vectors, vectors


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize(("master", "size"), [("split16", 2), ("split8", 1)])
def test_bytes_are_those_of_the_formula(master: str, size: int, ranks: int, zero: int) -> None:
    """A rank keeps a lower half and, if weights are gathered, the share of the upper half from which they are gathered."""
    spec = brief_run(plan={"data": ranks, "zero": zero}, model=SIZES, train=BF16, optimizer={"master": master})
    for held, matrices, vectors in run_ranks(_bytes, ranks, spec):
        upper = 2 * (matrices + vectors) if ranks > 1 else 0
        assert held["weights"] == size * matrices + 2 * vectors + upper
        assert held["optimizer"] == 8 * (matrices + vectors)


def _both(rank: int, spec: RunSpec) -> list[dict[str, int]]:
    made = [single_documents(spec)] * spec.microbatches
    return [count(spec, made, fake_tensors=fake).state for fake in (False, True)]


@pytest.mark.slow
@sampled(3, together=True)
@pytest.mark.parametrize(("master", "place"), [("split8", HALF), *[("split16", {})] * FULL], ids=str)
def test_a_dry_run_counts_what_a_real_one_holds(master: str, place: dict[str, Any]) -> None:
    spec = brief_run(plan={"data": 2, "zero": 1, "state": place}, train=BF16, optimizer={"master": master})
    for real, fake in run_ranks(_both, 2, spec):
        assert real == fake


@pytest.mark.slow
@sampled(3, together=True)
@pytest.mark.parametrize(
    ("plan", "master"),
    [
        ({}, "split16"),
        ({}, "split8"),
        ({"data": 2, "zero": 1}, "split16"),
        ({"data": 2, "zero": 2}, "split8"),
        ({"data": 2, "zero": 1, "state": DISK}, "split8"),
    ],
    ids=str,
)
def test_bytes_equal_the_prediction(plan: dict[str, Any], master: str) -> None:
    spec = brief_run(plan=plan, model=SIZES, train=BF16, optimizer={"master": master})
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=0), dry(spec, 0))}
    for name in ("memory.weights", "memory.optimizer", *(["memory.disk"] if "state" in plan else [])):
        line = lines[name]
        assert line.gap == pytest.approx(0, abs=0.03) if line.counted else not line.predicted, name
