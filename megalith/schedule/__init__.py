"""Pipeline schedules as data. Pure functions create schedules, and the same `Program` is verified, executed, timed and drawn. No
torch."""

from megalith.schedule.action import Action, Overlap, Row, RowEntry, Schedule
from megalith.schedule.file import dump
from megalith.schedule.lower import Program, lower
from megalith.schedule.simulate import Span, Timeline, activations, in_flight, simulate
from megalith.schedule.table import SCHEDULES, build, representative_microbatches, schedule_problem_texts, schedule_problems
from megalith.schedule.verify import problems

__all__ = [
    "SCHEDULES",
    "Action",
    "Overlap",
    "Program",
    "Row",
    "RowEntry",
    "Schedule",
    "Span",
    "Timeline",
    "activations",
    "build",
    "dump",
    "in_flight",
    "lower",
    "problems",
    "representative_microbatches",
    "schedule_problem_texts",
    "schedule_problems",
    "simulate",
]
