"""Training steps on a GPU equal the CPU's: in fp32, in bf16, compiled, and with recomputation."""

from typing import Any

import pytest
import torch

from megalith.parallel.gradients import local
from megalith.prove.compare import compare
from megalith.prove.parity import record, reference
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.loop import stepper_of
from megalith.train.measure.peak import matmul_rate
from megalith.train.run import choose_device
from megalith.train.step import StepResult, train_step
from tests.parallel.running import microbatches
from tests.specs import tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("default::UserWarning")]


def trainer_on(device: torch.device, spec: RunSpec, *, like: Trainer | None = None) -> Trainer:
    """Return a trainer on `device`. First weights are drawn on the device, so two trainers are equal only if weights
    are copied."""
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    if like is not None:
        for name, parameter in trainer.parameters.items():
            local(parameter.detach()).copy_(local(like.parameters[name].detach()))
    return trainer


def steps(trainer: Trainer, count: int) -> list[StepResult]:
    return [train_step(trainer, microbatches(trainer, step), step=step) for step in range(count)]


def run_of(**parts: dict[str, Any]) -> RunSpec:
    """A model with heads of 16 channels, which every fused attention kernel supports."""
    return tiny_run(**parts | {"model": {"dim": 64, "head_dim": 16} | parts.get("model", {})})


@pytest.mark.any_device
@pytest.mark.parametrize("tied", [False, True])
def test_steps_in_fp32_are_those_of_the_cpu(tied, gpu):
    spec = run_of(plan={"microbatch": 2}, model={"tied": tied})
    here = trainer_on(torch.device("cpu"), spec)
    there = trainer_on(gpu, spec, like=here)
    rows = compare(record(here), record(there), spec=spec)
    assert all(row.equal for row in rows), rows


@pytest.mark.any_device
def test_steps_under_a_plan_are_those_of_plain_pytorch_on_the_same_gpu(gpu):
    spec = run_of(plan={"microbatch": 2, "zero": 3, "recompute": "full"})
    rows = compare(reference(spec, device=gpu), record(trainer_on(gpu, spec)), spec=spec)
    assert all(row.equal for row in rows), rows


@pytest.mark.any_device
@pytest.mark.parametrize("plan", [{}, {"zero": 3, "recompute": "selective"}], ids=str)
def test_bf16_losses_stay_within_a_hundredth_of_fp32(plan, gpu):
    fp32 = trainer_on(gpu, run_of(plan={"microbatch": 2} | plan, train={"steps": 8}))
    bf16 = trainer_on(gpu, run_of(plan={"microbatch": 2} | plan, train={"steps": 8, "precision": "bf16"}), like=fp32)
    expected, found = ([done.loss for done in steps(trainer, 8)] for trainer in (fp32, bf16))
    assert found != expected
    assert all(abs(low - high) < 0.01 for low, high in zip(found, expected, strict=True)), (found, expected)
    assert {local(p.detach()).dtype for p in bf16.parameters.values()} == {torch.float32}
    assert {m.dtype for m in bf16.state.shares("optimizer").values()} == {torch.float32}


@pytest.mark.any_device
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_recomputation_gives_the_same_bits(recompute, gpu):
    plain = trainer_on(gpu, run_of(plan={"microbatch": 2}))
    again = trainer_on(gpu, run_of(plan={"microbatch": 2, "recompute": recompute}), like=plain)
    expected, found = (record(trainer) for trainer in (plain, again))
    assert found.losses == expected.losses
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)


@pytest.mark.any_device
@pytest.mark.parametrize("blocks", ["host", "disk"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensors_that_wait_outside_the_device_give_the_same_bits(recompute, blocks, gpu):
    train = {"precision": "bf16", "seq_len": 64}
    plain = trainer_on(gpu, run_of(plan={"microbatch": 2, "recompute": recompute}, train=train))
    plan = {"microbatch": 2, "recompute": recompute, "retain": {"blocks": blocks}}
    moved = trainer_on(gpu, run_of(plan=plan, train=train), like=plain)
    expected, found = (record(trainer) for trainer in (plain, moved))
    assert moved.tiers[blocks].counted.most > moved.tiers[blocks].counted.held == 0
    assert found.losses == expected.losses
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns
@pytest.mark.parametrize("blocks", ["host", "disk"])
def test_what_compiled_blocks_keep_can_wait_outside_the_device(blocks, gpu):
    torch.compiler.reset()
    plan, train = {"microbatch": 2, "compile": True}, {"precision": "bf16"}
    plain = trainer_on(gpu, run_of(plan=plan, train=train))
    moved = trainer_on(gpu, run_of(plan=plan | {"retain": {"blocks": blocks}}, train=train), like=plain)
    expected, found = (steps(trainer, 3) for trainer in (plain, moved))
    assert moved.tiers[blocks].counted.most > moved.tiers[blocks].counted.held == 0
    assert all(abs(one.loss - other.loss) < 2e-2 for one, other in zip(expected, found, strict=True))


@pytest.mark.any_device
def test_inputs_kept_in_8_bits_change_no_forward(gpu):
    choices = {"kept": "fp8", "tile": 16, "wide_first": 0, "wide_last": 0}
    wide = trainer_on(gpu, run_of(plan={"microbatch": 2}, train={"precision": "bf16"}))
    kept = trainer_on(gpu, run_of(plan={"microbatch": 2}, train={"precision": "bf16"}, precision=choices), like=wide)
    expected, found = (steps(trainer, 3) for trainer in (wide, kept))
    assert found[0].loss == expected[0].loss
    assert all(abs(one.loss - other.loss) < 2e-2 for one, other in zip(expected, found, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about cores, TF32 and kernels it did not choose
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_compiled_blocks_train_like_eager_ones(precision, bound, gpu):
    torch.compiler.reset()
    eager = trainer_on(gpu, run_of(plan={"microbatch": 2}, train={"precision": precision}))
    compiled = trainer_on(gpu, run_of(plan={"microbatch": 2, "compile": True}, train={"precision": precision}), like=eager)
    for one, other in zip(steps(eager, 3), steps(compiled, 3), strict=True):
        assert abs(one.loss - other.loss) < bound
        assert abs(one.grad_norm / other.grad_norm - 1) < 10 * bound


def test_a_step_tells_its_times_and_memory(gpu):
    trainer = trainer_on(gpu, run_of(train={"precision": "bf16"}))
    _, second = steps(trainer, 2)
    assert 0 < sum(second.breakdown.values()) <= 1.01 * second.seconds
    assert all(seconds >= 0 for seconds in second.breakdown.values())
    assert second.memory["peak"] >= second.memory["weights"] + second.memory["optimizer"]


def test_auto_takes_this_gpu(gpu):
    assert choose_device("auto", 0, 1) == choose_device("cuda", 0, 1) == gpu
    with pytest.raises(RuntimeError, match="Use one rank per GPU"):
        choose_device("cuda", 0, torch.cuda.device_count() + 1)


def test_the_measured_rate_is_that_of_a_gpu(gpu):
    assert matmul_rate(torch.bfloat16, gpu, seconds=0.2) > 1e11


@pytest.mark.any_device
def test_an_update_checked_late_and_undone_gives_the_same_bits(gpu):
    def run(clip: float, late: bool) -> tuple[Trainer, list[StepResult]]:
        spec = run_of(
            plan={"post_validation": late, "zero": 1}, optimizer={"clip": clip}, train={"steps": 8, "precision": "bf16"}
        )
        torch.manual_seed(0)
        trainer = trainer_on(gpu, spec)
        stepper = stepper_of(trainer)
        told = [done for step in range(8) for done in stepper.step(microbatches(trainer, step), step=step)]
        return trainer, told + stepper.settle()

    limit = sorted(done.grad_norm for done in run(0.0, False)[1])[4]
    (whole, expected), (early, found) = run(limit, False), run(limit, True)
    assert [(done.loss, done.grad_norm) for done in found] == [(done.loss, done.grad_norm) for done in expected]
    assert {any(name == "UNDO" for name, _, _ in done.spans) for done in found[1:]} == {True, False}
    for name, tensor in whole.state.tensors().items():
        assert torch.equal(local(tensor), local(early.state.tensors()[name])), name
