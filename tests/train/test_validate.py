"""The held-out loss equals the plain model's on the same samples, under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.models.batch import Batch
from megalith.parallel.gradients import local
from megalith.spec.run import RunSpec
from megalith.train.batches import Cut, to_batch
from megalith.train.step import train_step
from megalith.train.stream import open_stream
from megalith.train.validate import Validator
from tests.full import sampled
from tests.models.plain import stage
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data

pytestmark = pytest.mark.slow

PLANS: list[dict[str, Any]] = [
    {},
    {"microbatch": 3},
    {"data": 2, "pipeline": 2},
    {"data": 2, "pipeline": 2, "zero": 3, "microbatch": 2},
    {"tensor": 2},
    {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_data(tmp_path_factory.mktemp("data"))


def run_of(data: str, plan: dict[str, Any], *, samples: int, masked: bool = True) -> RunSpec:
    return tiny_run(
        model={"vocab": VOCAB},
        plan=plan,
        data={"path": data, "document_mask": masked},
        train={"global_batch": 12},
        validation={"every": 1, "samples": samples},
    )


def _validated(rank: int, spec: RunSpec) -> tuple[float, dict[str, float]]:
    trainer = trainer_of(spec)
    return Validator(trainer, open_stream(spec, "validation")).run()


@torch.no_grad()
def plainly(spec: RunSpec) -> tuple[float, dict[str, float], dict[str, int]]:
    """Return the loss over all targets, by domain, and the samples of each domain, one by one through the plain model."""
    model, stream = stage(spec.model), open_stream(spec, "validation")
    totals, counts, sizes = {}, {}, {}
    for domain in stream.domains:
        numbers = stream.validation_samples(domain, spec.validation.samples)
        losses = []
        for number in numbers:
            batch: Batch = to_batch(stream.batch([number]), Cut(masked=spec.data.document_mask), device=CPU, loss_scale=1.0)
            losses.append((float(model(batch.tokens, batch).nll), int((batch.targets >= 0).sum())))  # pyright: ignore
        totals[domain], counts[domain] = (sum(column) for column in zip(*losses, strict=True))
        sizes[domain] = len(numbers)
    return sum(totals.values()) / sum(counts.values()), {d: totals[d] / counts[d] for d in totals}, sizes


@pytest.mark.parametrize(
    ("plan", "samples"), [*((plan, 5) for plan in PLANS), (PLANS[2], 1), (PLANS[2], 1000), (PLANS[3], 1000)], ids=str
)
def test_the_loss_is_that_of_the_plain_model_on_the_same_samples(plan, samples, data):
    spec = run_of(data, plan, samples=samples)
    loss, domains, sizes = plainly(spec)
    assert samples != 1000 or len(set(sizes.values())) == 2  # all samples: domains of different sizes, one of them odd
    for found, by_domain in run_ranks(_validated, spec.plan.ranks, spec):
        assert found == pytest.approx(loss, abs=1e-5)
        assert by_domain == pytest.approx(domains, abs=1e-5)


def test_without_document_masks_too(data):
    spec = run_of(data, {"data": 2, "pipeline": 2}, samples=3, masked=False)
    loss, domains, _ = plainly(spec)
    for found, by_domain in run_ranks(_validated, 4, spec):
        assert found == pytest.approx(loss, abs=1e-5)
        assert by_domain == pytest.approx(domains, abs=1e-5)
    masked, _, _ = plainly(run_of(data, {}, samples=3))
    assert abs(masked - loss) > 1e-5


def _between_steps(rank: int, spec: RunSpec, validates: bool) -> dict[str, torch.Tensor]:
    trainer = trainer_of(spec)
    validator = Validator(trainer, open_stream(spec, "validation"))
    for step in range(3):
        train_step(trainer, microbatches(trainer, step), step=step)
        if validates:
            before = validator.run()
            assert before == validator.run()
    return {name: local(p.detach()).clone() for name, p in trainer.parameters.items()}


@pytest.mark.parametrize("plan", [{"data": 2, "zero": 3}, {"data": 2, "zero": 1, "microbatch": 2}, {"pipeline": 2}], ids=str)
@sampled(1)
def test_validating_leaves_no_trace_in_training(plan, data: str, tmp_path: Path):
    spec = run_of(data, plan, samples=3)
    with_it, without = (run_ranks(_between_steps, 2, spec, validates) for validates in (True, False))
    for one, other in zip(with_it, without, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
