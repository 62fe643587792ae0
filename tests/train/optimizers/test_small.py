"""Moments in few bits have the same bits under every plan and in every place, and a resumed run converts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.parallel.data import local
from megalith.prove.parity import _together
from megalith.spec.run import RunSpec
from megalith.spec.treatment import Treatment, treatments
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.received import receive
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


@pytest.mark.parametrize(("model", "plan"), PLANS, ids=str)
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
        == "optimizer.moments was fp32 when step 1 was saved and is fp8: the moments are converted, rounded as an update rounds them"
    )
    assert told[4][0].endswith("is fp32: the moments are converted, exactly")
    down = loaded["moments.second.blocks.0.mlp.down.weight"]
    assert down.dtype == torch.float32 and bool((down > 0).all())
