"""A table that grows by one row of values at each step. The time to read any range of steps depends only on the numbers of records and
values asked for.

Level 0 has a record for each step of the run. A record of level n + 1 covers FAN records of level n: it has the minimum and
maximum of each value, and for numbers also the mean. A reader uses the finest level that covers the steps with no more records
than asked for. Each level keeps only its newest `keep` bytes, or MINIMUM records if these take more. Older steps remain at
coarser levels, so the files of a run of any length have a bounded size.

Files are only appended to, until they are removed. The file `PIECE-LEVEL-STEP.bin` has the records from STEP on. A piece is the
output of one writer; when the run returns to an earlier step, a new writer begins a new piece. A record that was truncated (full disk,
killed writer) ends its file; the next record goes to a new file.
"""

from megalith.pyramid.format import FAN, Kind, record_bytes
from megalith.pyramid.reader import Reader, View
from megalith.pyramid.writer import KEEP, LEVELS, MINIMUM, SEGMENTS, Writer

__all__ = ["FAN", "KEEP", "LEVELS", "MINIMUM", "SEGMENTS", "Kind", "Reader", "View", "Writer", "record_bytes"]
