"""Moments in few bits have the same bits under every plan and in every place, and a resumed run converts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.cost.update import _opened
from megalith.kernels.numbers import DTYPE
from megalith.parallel.data import local
from megalith.prove.meter import Meter
from megalith.prove.parity import _together
from megalith.spec.model import Growth
from megalith.spec.run import OptimizerSpec, RunSpec
from megalith.spec.sizes import Parameter
from megalith.spec.state import PIECES
from megalith.spec.treatment import Treatment, treatment, treatments
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Optimizer, Part
from megalith.train.received import receive
from tests.full import sampled
from tests.parallel.running import CPU
from tests.ranks import run_ranks
from tests.train.optimizers.test_plans import DENSE, EXPERTS, _all_kinds, alone, set_gradients, spec_of

SMALL: dict[str, Any] = {"moment_block": 4, "moment_least": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    f"{kind}, {moments}": {"kind": kind, "moments": moments} | SMALL
    for kind, moments in (("adamw", "fp8"), ("adamw", "bf16"), ("lion", "fp8"), ("sgd", "bf16"), ("muon", "fp8"))
}
PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"data": 3, "zero": 1, "state": {"optimizer": "disk"}}),
    (DENSE, {"tensor": 2, "data": 2, "zero": 3, "state": {"optimizer": "host", "share": 0.5}}),
    (EXPERTS, {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), PLANS, ids=str)
@sampled(1)
def test_an_update_is_the_same_under_every_plan(model: dict[str, Any], plan: dict[str, Any]) -> None:
    expected = alone(model, VARIANTS)
    specs = {name: spec_of(model, plan, **optimizer) for name, optimizer in VARIANTS.items()}
    found = run_ranks(_all_kinds, next(iter(specs.values())).plan.ranks, specs)[0]
    for name, state in found.items():
        assert not differing(state, expected[name], specs[name]), name


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], spec: RunSpec) -> list[str]:
    """Return the tensors of small parameters that differ by any bit. For the others, torch's fused AdamW rounds the ends of shares
    differently."""
    small = {name for name, each in treatments(spec.model.build(), spec.optimizer).items() if each.moments.number != "fp32"}
    assert small
    keys = [key for key in expected if any(key.endswith(f".{name}") for name in small)]
    return [key for key in keys if not torch.equal(found[key], expected[key])]


PIECED: dict[str, dict[str, Any]] = {
    "fp8, halves": {"kind": "adamw", "moments": "fp8", "master": "split8"} | SMALL,
    "bf16, halves": {"kind": "lion", "moments": "bf16", "master": "split16"} | SMALL,
    "wide, gradients in bf16": {"kind": "adamw"},
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", PIECED.values(), ids=PIECED)
def test_the_size_of_a_piece_changes_no_bit(optimizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes larger pieces than a CPU."""
    spec = spec_of({"dim": 48, "head_dim": 12, "ffn": 72}, {}, **optimizer)  # no whole number of rows is a piece
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"precision": "bf16"})})
    found = []
    for size in (64, 1 << 10, PIECES["cuda"]):
        monkeypatch.setitem(PIECES, "cpu", size)
        found.append(run_ranks(_in_bf16, 1, spec)[0])
    first, *others = found
    assert all(torch.equal(other[key], first[key]) for other in others for key in first)


def _in_bf16(rank: int, spec: RunSpec) -> dict[str, Tensor]:
    """Return the state after three updates from gradients in bf16."""
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU)
    for step in range(3):
        set_gradients(trainer, step)
        parts = [part._replace(gradient=part.gradient.bfloat16()) for part in trainer.state.parts()]
        with torch.no_grad():
            trainer.rule.update(parts, number=step, lr=trainer.lr)
        trainer.state.settle()
        trainer.state.drop_gradients()
    return _together(trainer.state.laid(), trainer)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", ["fp32", "split16", "split8"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_a_piece_takes_the_bytes_predicted(
    moments: str, master: str, gradients: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the most that an update holds besides what it changes, for each number of a piece."""
    monkeypatch.setitem(PIECES, "cpu", 1 << 14)
    optimizer = OptimizerSpec.model_validate({"kind": "adamw", "moments": moments, "master": master})
    shape = (64, 1024)
    described = Parameter("w", shape, "matrix")
    treated = treatment(described, optimizer, Growth())
    rule = Optimizer(optimizer, {"w": treated}, GlobalTensors.alone({"w": nn.Parameter(torch.zeros(shape))}, {"w": described}))
    slots = {slot.name: torch.zeros(slot.shape_of(shape), dtype=DTYPE[slot.number]) for slot in treated.slots}
    weight = torch.zeros(shape, dtype=torch.float32 if master == "fp32" else torch.bfloat16)
    part = Part("w", weight, torch.zeros(shape, dtype=gradients), slots)
    with Meter() as meter, torch.no_grad():
        for tensor in (part.weight, part.gradient, *slots.values()):
            meter.label(tensor, "weights")
        meter.begin_step()
        rule.update([part], number=0, lr=1e-3)
    ((_, each),) = _opened((described,), "adamw", optimizer.small, master, gradients.itemsize)
    assert meter.memory().peak["activations"] / PIECES["cpu"] == pytest.approx(each, rel=0.01, abs=0.01)


# --- resumed runs ---

DISK: dict[str, Any] = {"data": 2, "state": {"optimizer": "disk"}}
CHAIN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {}),
    ("fp8", {"tensor": 2}),
    ("fp8", DISK),
    ("bf16", DISK),
    ("fp32", {"data": 2}),
)
"""Formats and plans of runs that each resume from the one before."""


def _resumed(rank: int, folder: Path, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """One run of the chain: load, update, save. Return, on the first rank, the moments as loaded and as saved, and the warnings."""

    def kept() -> dict[str, Tensor]:
        held = trainer.state.laid()
        return _together({key: held[key] for key in held if key.startswith("moments.")}, trainer)

    moments, plan = CHAIN[number]
    spec = spec_of(DENSE, plan, kind="adamw", moments=moments, **SMALL)
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU)
    checkpointer, warned = Checkpointer(folder), list[str]()
    if moments == "fp8" and "state" not in plan:
        shares = {name: local(parameter) for name, parameter in trainer.parameters.items()}
        assert trainer.state.bytes()["optimizer"] == sum(
            _bytes_of(trainer.rule.treated[name], share) for name, share in shares.items()
        )
    if number:
        assert receive(trainer, checkpointer.load, warned.append) is not None
    loaded = kept()
    trainer.state.updates = number
    set_gradients(trainer, number)
    trainer.update()
    described: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "position": {"updates": number + 1}}
    checkpointer.save(number + 1, trainer.state.laid(), described, asynchronous=False)
    assert not [outcome for outcome in checkpointer.wait() if hasattr(outcome, "error")]
    return loaded, kept(), warned


def _bytes_of(treated: Treatment, share: Tensor) -> int:
    """Each of the two moments is codes and a byte for each four numbers of a row, or fp32."""
    if treated.moments.number == "fp32":
        return 8 * share.numel()
    return 2 * (share.numel() + -(-share.shape[-1] // 4) * (share.numel() // share.shape[-1]))


@pytest.mark.slow
def test_a_resumed_run_converts_the_moments_under_any_plan(tmp_path: Path) -> None:
    told, saved, loaded = [], dict[str, Tensor](), dict[str, Tensor]()
    for number, (moments, plan) in enumerate(CHAIN):
        before, ranks = saved, spec_of(DENSE, plan).plan.ranks
        loaded, saved, warned = run_ranks(_resumed, ranks, tmp_path, number)[0]
        told.append(warned)
        if number and CHAIN[number - 1][0] == moments:
            assert all(torch.equal(loaded[key], before[key]) for key in before), "any plan loads the bytes of any other"
    assert [len(each) for each in told] == [0, 1, 0, 1, 1]
    assert (
        told[1][0]
        == "optimizer.moments was fp32 when step 1 was saved and is now fp8: the moments are converted and rounded as in an update"
    )
    assert told[4][0].endswith("is now fp32: the moments are converted exactly")
    down = loaded["moments.second.blocks.0.mlp.down.weight"]
    assert down.dtype == torch.float32 and bool((down > 0).all())
