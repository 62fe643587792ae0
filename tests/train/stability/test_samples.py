"""Losses of a step's samples: only the step's own samples count, whatever else is computed."""

import pytest

from megalith.spec.run import RunSpec
from megalith.train.measure.aside import buckets_of
from megalith.train.reexecution import GradientProbe, GradientVerifier
from megalith.train.stability.samples import SampleLosses
from megalith.train.step import accumulate
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run


def _losses(rank: int, spec: RunSpec) -> tuple[int, list[tuple[float, int]], list[tuple[float, int]]]:
    """Return the step's samples on this rank, and their losses without and with the step's verification."""
    trainer, found = trainer_of(spec), list[list[tuple[float, int]]]()
    mine = microbatches(trainer)
    count = sum(len(each.numbers) for each in mine)
    verifier = GradientVerifier(trainer, GradientProbe(buckets_of(trainer)), read=lambda step, rank: mine, microbatches="all")
    for verified in (False, True):
        samples = SampleLosses(trainer, count=count)
        accumulate(trainer, mine)
        if verified:
            verifier.again(0)
        found.append(samples.close())
        trainer.drop()
    return count, found[0], found[1]


@pytest.mark.slow
def test_a_verified_step_has_the_losses_of_its_own_samples() -> None:
    ((count, alone, verified),) = run_ranks(_losses, 1, tiny_run(train={"global_batch": 4}))
    assert len(alone) == count == 4 and verified == alone
