"""Pipeline schedules as data: pure functions make them; one `Program` is checked, executed, timed and drawn. No torch."""

from megalith.schedule.action import Action, Overlap, Row, Schedule, Slot
from megalith.schedule.file import dump
from megalith.schedule.lower import Program, lower
from megalith.schedule.simulate import Span, Timeline, activations, in_flight, simulate
from megalith.schedule.table import SCHEDULES, build, enough, misfits, refusals
from megalith.schedule.verify import problems

__all__ = [
    "SCHEDULES",
    "Action",
    "Overlap",
    "Program",
    "Row",
    "Schedule",
    "Slot",
    "Span",
    "Timeline",
    "activations",
    "build",
    "dump",
    "enough",
    "in_flight",
    "lower",
    "misfits",
    "problems",
    "refusals",
    "simulate",
]
