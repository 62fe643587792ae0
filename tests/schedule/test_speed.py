"""Large programs (16 ranks, 512 microbatches, 8 chunks: 450,000 entries) are made and timed in seconds, because work is proportional to
entries."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from megalith.schedule.lower import lower
from megalith.schedule.simulate import simulate
from megalith.schedule.table import SCHEDULES, build
from megalith.schedule.verify import problems


def opcodes(function: Callable[[], Any]) -> int:
    """Return the number of interpreter instructions of a call, a time that does not depend on the machine."""
    count = 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_a_slot_costs_the_same_in_a_large_program_as_in_a_small_one(name):
    costs: dict[str, list[float]] = {}
    for ranks, microbatches in ((2, 4), (8, 16)):
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=SCHEDULES[name].chunks.nearest(2))
        program = lower(schedule, 2)
        entries = sum(map(len, program.rows))
        for what, function in {
            "lower": lambda schedule=schedule: lower(schedule, 2),
            "simulate": lambda program=program: simulate(program, {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}),
            "problems": lambda program=program: problems(program),
        }.items():
            costs.setdefault(what, []).append(opcodes(function) / entries)
    for what, (small, large) in costs.items():
        assert large < 1.4 * small, (what, small, large)
