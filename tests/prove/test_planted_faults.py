"""Faults planted in the trainer's own code are found within the limits of each precision. Without them the same plan is equal."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from megalith.kernels import narrow
from megalith.kernels.narrow import Narrow
from megalith.kernels.quantise import Scaling, Share, quantise
from megalith.parallel import gradients
from megalith.parallel.data import Weight
from megalith.prove.compare import Recording
from megalith.prove.parity import record, reference, shrink
from megalith.prove.verdict import Verdict, judge
from megalith.spec.numbers import TRAINED, is_narrow
from megalith.spec.run import RunSpec
from megalith.train import step
from megalith.train.assemble import Trainer
from tests.full import sampled
from tests.parallel.running import CPU, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

pytestmark = pytest.mark.slow

OFF = 1.02
PART_OFF = {"mxfp4": 1.05}
"""Precision -> relative error of a part's gradient, if not `OFF`. In 4 bits powers of two are so coarse that 2 % may be chance."""
PART = "blocks.1."
"""The part of the model whose gradient is wrong."""
REFERENCES: dict[Any, Recording] = {}

Fault = Callable[[Trainer], AbstractContextManager[Any]]


@contextmanager
def missing_reduction(trainer: Trainer) -> Iterator[None]:
    """Plant: one gradient bucket is not reduced over data ranks, or partial gradients are not summed over tensor or pipeline
    ranks."""
    calls, reduce_scatter = iter(range(1_000)), dist.reduce_scatter_tensor

    def once_left_out(mine: Tensor, everyone: Tensor, *, group: dist.ProcessGroup, **options: Any) -> Any:
        if not options.get("async_op") or next(calls) != 2:  # true for a bucket's reduction, false for one of activations
            return reduce_scatter(mine, everyone, group=group, **options)
        mine.copy_(everyone.view(group.size(), -1)[group.rank()])
        return None

    with (
        mock.patch.object(dist, "reduce_scatter_tensor", once_left_out),
        mock.patch.object(gradients, "_sum_bucket", return_value=None),
    ):
        yield


@contextmanager
def part_off(trainer: Trainer) -> Iterator[None]:
    """Plant: the gradient of one block is 2 % too large, in MXFP4 5 %."""
    off = PART_OFF.get(trainer.spec.train.precision, OFF)
    chosen = {id(kept) for name, kept in trainer.parameters.items() if name.startswith(PART)}
    add = Weight.add

    def longer(self: Weight, share: Tensor) -> None:
        add(self, share * off if id(self.master) in chosen else share)

    with mock.patch.object(Weight, "add", longer):
        yield


@contextmanager
def microbatch_off(trainer: Trainer) -> Iterator[None]:
    """Plant: the first microbatch has 2 % too much weight."""
    to_batches = step.to_batches

    def first_counts_more(*args: Any, **options: Any) -> Any:
        first, *others = to_batches(*args, **options)
        return [replace(first, loss_scale=first.loss_scale * OFF), *others]

    with mock.patch.object(step, "to_batches", first_counts_more):
        yield


@contextmanager
def scales_transposed(trainer: Trainer) -> Iterator[None]:
    """Plant: the scales of matrices are read in the wrong order, as a compiler once did (pytorch#161127)."""

    def misread(
        x: Tensor, scaling: Scaling, draws: Tensor | None = None, lost: Tensor | None = None, *, share: Share | None = None
    ) -> Tensor:
        found = quantise(x, scaling, share=share, draws=draws)
        if x.dim() == 2:
            found = replace(found, scales=found.scales.T.reshape(found.scales.shape))
        return found.decoded().to(x.dtype if scaling.exact else found.scales.dtype)

    with mock.patch.object(narrow, "in_slabs", misread), mock.patch.object(narrow, "narrowed", misread):
        yield


@contextmanager
def maxima_not_shared(trainer: Trainer) -> Iterator[None]:
    """Plant: each rank uses the maximum of its part of a tensor instead of the whole tensor's."""
    with ExitStack() as stack:
        for recipe in {id(r): r for r in recipes(trainer)}.values():
            stack.enter_context(mock.patch.object(recipe, "shares", {}))
        yield


def recipes(trainer: Trainer) -> list[Narrow]:
    """Return the narrow recipes of a rank's layers."""
    modules = [module for stage in trainer.stages.values() for module in stage.modules()]
    return [recipe for module in modules if isinstance(recipe := getattr(module, "multiply", None), Narrow)]


FAULTS: dict[str, Fault] = {
    "none": lambda trainer: nullcontext(),
    "missing reduction": missing_reduction,
    "part off": part_off,
    "microbatch off": microbatch_off,
}
OF_TILES: dict[str, Fault] = {"scales transposed": scales_transposed}
OF_SPANS: dict[str, Fault] = {"maxima not shared": maxima_not_shared}


def recordings(rank: int, spec: RunSpec) -> dict[str, Recording]:
    """Return recordings of the run with each fault, one after the other on the same ranks."""
    found = {}
    tiles = OF_TILES if is_narrow(spec.train.precision) and spec.precision.granularity == "tile" else {}
    spans = OF_SPANS if spec.precision.granularity != "tile" or spec.train.precision == "nvfp4" else {}
    for name, fault in (FAULTS | tiles | spans).items():
        trainer = trainer_of(spec)
        with fault(trainer):
            found[name] = record(trainer)
    return found if rank == 0 else {}


def alone(spec: RunSpec) -> Recording:
    key = spec.model, spec.train, spec.precision, spec.plan.set_sequences
    if key not in REFERENCES:
        REFERENCES[key] = reference(spec, device=CPU)
    return REFERENCES[key]


def judged(spec: RunSpec) -> dict[str, Verdict]:
    """Return the verdict on the run with each fault."""
    return {name: judge(one, spec=spec, alone=alone) for name, one in run_ranks(recordings, spec.plan.ranks, spec)[0].items()}


def gaps(verdict: Verdict) -> str:
    return "\n".join(row.quantity for row in verdict.rows if not row.equal)


@pytest.mark.parametrize("precision", TRAINED)
@pytest.mark.parametrize("plan", [{"data": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("preset", ["tiny", "mixtral-8x7b"])
@sampled(4, together=True)
def test_each_fault_is_found(preset: str, plan: dict[str, Any], precision: str) -> None:
    """The embedding is tied, so that pipeline ranks have a gradient to sum."""
    run = tiny_run(plan=plan, model={"preset": preset, "tied": True}, train={"global_batch": 8, "precision": precision})
    spec = shrink(run, steps=2)
    assert spec.train.precision == precision
    verdicts = judged(spec)
    assert verdicts["none"].equal and not verdicts["none"].tokens_tied, verdicts["none"]
    assert "gradients" in gaps(verdicts["missing reduction"]), verdicts["missing reduction"]
    assert "gradients" in gaps(verdicts["part off"]), verdicts["part off"]
    for name in OF_TILES.keys() & verdicts.keys():
        assert "gradients" in gaps(verdicts[name]), verdicts[name]
    expected = "gradients" if precision == "fp32" else "weight of a microbatch"
    assert expected in gaps(verdicts["microbatch off"]), verdicts["microbatch off"]


def test_a_transposed_scale_in_fp32_is_found() -> None:
    run = tiny_run(
        plan={"tensor": 2},
        model={"preset": "tiny", "tied": True},
        train={"global_batch": 8, "precision": "fp8"},
        precision={"scale": "fp32"},
    )
    spec = shrink(run, steps=2)
    verdicts = judged(spec)
    assert verdicts["none"].equal, verdicts["none"]
    assert "gradients" in gaps(verdicts["part off"]), verdicts["part off"]
    assert "gradients" in gaps(verdicts["scales transposed"]), verdicts["scales transposed"]


def not_taken_in_together(rank: int, spec: RunSpec) -> Recording:
    """In this run each rank uses the maxima of its own microbatches and its own part of a tensor."""

    def alone(self: Trainer) -> None:
        for recipe in self.delayed():
            assert recipe.latest is not None
            recipe.take_in(recipe.latest)

    with mock.patch.object(Trainer, "_take_in_maxima", alone):
        return record(trainer_of(spec))


def test_a_history_that_is_not_shared_is_found() -> None:
    run = tiny_run(
        plan={"data": 2},
        model={"preset": "tiny", "tied": True},
        train={"global_batch": 8, "precision": "fp8"},
        precision={"granularity": "tensor", "history": 2},
    )
    spec = shrink(run, steps=2)
    verdicts = judged(spec)
    assert verdicts["none"].equal, verdicts["none"]
    assert "gradients" in gaps(verdicts["part off"]), verdicts["part off"]
    fault = judge(run_ranks(not_taken_in_together, spec.plan.ranks, spec)[0], spec=spec, alone=alone)
    assert "maxima" in gaps(fault), fault


@pytest.mark.parametrize("plan", [{"tensor": 2}, {"context": 2}], ids=str)
@pytest.mark.parametrize(("precision", "granularity"), [("fp8", "row"), ("fp8", "tensor"), ("nvfp4", "tile")])
@sampled(4, together=True)
def test_a_maximum_that_is_not_shared_is_found(precision: str, granularity: str, plan: dict[str, Any]) -> None:
    run = tiny_run(
        plan=plan,
        model={"preset": "mixtral-8x7b", "tied": True},
        train={"global_batch": 8, "precision": precision},
        precision={"granularity": granularity},
    )
    spec = shrink(run, steps=2)
    verdicts = judged(spec)
    assert verdicts["none"].equal, verdicts["none"]
    assert "gradients" in gaps(verdicts["part off"]), verdicts["part off"]
    assert "maxima" in gaps(verdicts["maxima not shared"]), verdicts["maxima not shared"]
