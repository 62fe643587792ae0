"""Comparison of a rank's prediction with its dry run, figure by figure under common names. No torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megalith.cost.predicted import Comparison, PredictedStep

if TYPE_CHECKING:
    from megalith.prove.dryrun import RankCounts


def compare(predicted: PredictedStep, counted: "RankCounts") -> tuple[Comparison, ...]:
    """Compare every counted figure, and every predicted figure that the dry run lacks (counted: 0)."""
    memory = [Comparison(f"memory.{name}", predicted.memory[name], size) for name, size in counted.memory.peak.items()]
    memory.append(Comparison("memory.all", sum(predicted.memory.values()), sum(counted.memory.peak.values())))
    memory += [Comparison(f"memory.{tier}", size, counted.state.get(tier, 0)) for tier, size in predicted.elsewhere.items()]
    work = [
        Comparison(f"work.{name}", getattr(predicted.work, name), getattr(counted.work, name))
        for name in ("products", "attention")
    ]
    return (*memory, *_traffic(predicted, counted), *work)


def _traffic(predicted: PredictedStep, counted: "RankCounts") -> Iterator[Comparison]:
    """Compare the traffic. In the dry run, axes with the same ranks form one group ("world / dp_shard"), which is compared with the
    sum of the predictions for these axes."""
    left = list(predicted.traffic)
    for row in counted.traffic:
        mine = [one for one in left if one.kind == row.kind and one.axis in row.axis.split(" / ")]
        left = [one for one in left if one not in mine]
        for what in ("calls", "bytes"):
            expected = sum(getattr(one, what) for one in mine) if mine else None
            yield Comparison(f"traffic.{row.axis}.{row.kind}.{what}", expected, getattr(row, what))
    for one in left:
        for what in ("calls", "bytes"):
            yield Comparison(f"traffic.{one.axis}.{one.kind}.{what}", getattr(one, what), 0)
