"""A table that grows by one row of values a step, kept so that any part of it can be drawn in the time that its pixels take.

Level 0 has a record for each step. A record of level n + 1 covers FAN records of level n: of each value the least and the most, and of
numbers their mean. A reader takes the finest level with no more records than it has columns to draw. Each level keeps its newest
`keep` bytes; older steps remain at coarser levels, so the files of a run of any length have a bounded size.

Files are only appended to. `PIECE-LEVEL-STEP.bin` holds records from STEP on: a piece is the output of one writer between two
returns to an earlier step. A record that was truncated by a full disk or a dead writer ends its file; the next writer begins
another file.
"""

from megalith.pyramid.format import FAN, Kind, record_bytes
from megalith.pyramid.reader import Reader, View
from megalith.pyramid.writer import KEEP, LEAST, LEVELS, SEGMENTS, Writer

__all__ = ["FAN", "KEEP", "LEAST", "LEVELS", "SEGMENTS", "Kind", "Reader", "View", "Writer", "record_bytes"]
