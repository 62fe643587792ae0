"""Garbage collections of all ranks are measured, and logged with the spans of a step."""

import gc
from pathlib import Path

import pytest

from megalith.events import Spans, of_kind, read
from megalith.train.measure.collector import Collector
from tests.runs import prepare_text, train, when
from tests.specs import tiny_run

pytestmark = pytest.mark.slow


def _collect() -> None:
    kept = [[] for _ in range(200_000)]
    gc.collect()
    del kept


def test_collections_are_measured_once() -> None:
    collector = Collector()
    _collect()
    assert collector.take() > 0.001 and collector.take() < 0.001
    gc.callbacks.remove(collector._note)


def test_the_slowest_rank_is_logged(tmp_path: Path) -> None:
    spec = tiny_run(model={"vocab": 264}, plan={"data": 2}, data={"path": str(prepare_text(tmp_path))}, train={"global_batch": 4})
    for number in (0, 1):
        folder = tmp_path / str(number)
        with when("step", None, rank=1, act=_collect if number else lambda: None):
            train(spec, folder)
    calm, busy = (of_kind(read(tmp_path / str(number)), Spans)[0] for number in (0, 1))
    assert calm.since == busy.since == 2 and busy.collecting > calm.collecting + 0.001
