"""Writes the folder of a finished run of any length and size: each level of the pyramids holds its newest records."""

import struct
import zlib
from pathlib import Path

import numpy as np

from megalith import events, pyramid
from megalith.control import times
from megalith.pyramid import format
from megalith.watch import index
from tests.report import run_folder


def write_level(folder: Path, kind: pyramid.Kind, width: int, level: int, steps: int, make, *, least: int, keep: int) -> None:
    """Write the files of one level after `steps` steps. Records are kept by the same rule by which a writer drops them."""
    size = pyramid.record_bytes(kind, width, level)
    a_file = max(keep // pyramid.SEGMENTS // size, least // pyramid.SEGMENTS)
    a_record = pyramid.FAN**level
    records = steps // a_record
    kept = max(keep, least * size) // (a_file * size) + 1
    for number in range(max(0, -(-records // a_file) - kept), -(-records // a_file)):
        first = 1 + number * a_file * a_record
        with (folder / format.name_of(0, level, first)).open("wb") as file:
            file.write(format.FILE.pack(format.MAGIC, list(format.TYPES).index(kind), level, width))
            for record in range(number * a_file, min(records, (number + 1) * a_file)):
                begin = 1 + record * a_record
                bases, arrays = make(begin, a_record, level)
                head = format.HEAD.pack(begin, begin + a_record - 1, a_record, 1e9 + begin, *bases)
                file.write(head + struct.pack("<I", zlib.crc32(head)) + b"".join(map(bytes, arrays)))


def write(
    folder: Path,
    *,
    steps: int,
    data: int,
    pipeline: int,
    tensor: int,
    slow: int,
    least: int = pyramid.MINIMUM,
    keep: int = pyramid.KEEP,
) -> Path:
    """Write a run in which rank `slow` works 1.3 times as long as its peers in the last tenth of the steps."""
    ranks = data * pipeline * tensor
    plan = run_folder.PLAN.model_copy(update={"data": data, "pipeline": pipeline, "tensor": tensor, "zero": 1})
    start = run_folder.start(plan=plan)
    start.spec["train"] |= {"steps": steps, "global_batch": data * 4 * pipeline}
    (folder / index.FOLDER).mkdir(parents=True)
    (folder / times.FOLDER).mkdir(parents=True)
    (folder / "run.toml").write_text("")
    log = events.EventLog(folder)
    log.write(start)
    log.write(run_folder.step(steps))
    log.close()
    end = (folder / events.FILE).stat().st_size
    line = (folder / events.FILE).read_bytes().split(b"\n")[0]
    (folder / index.FOLDER / index.NOTES).write_bytes(b'{"at":%d,"event":%s}\n' % (len(line) + 1, line))
    random = np.random.default_rng(0)
    noise = [times.encode(1 + 0.03 * random.standard_normal(len(times.ROWS) * ranks)) for _ in range(16)]
    quick = [np.minimum(one, other) for one, other in zip(noise, noise[1:] + noise[:1], strict=True)]
    late = [one.copy() for one in noise]
    for one in late:
        one[slow] = times.encode(np.array([1.3]))[0]

    def of_ranks(begin: int, steps_of: int, level: int):
        high = (late if begin > 0.9 * steps else noise)[begin // max(steps_of, 1) % 16]
        return (0.5, 4e10), [high] if level == 0 else [quick[begin % 16], high]

    def of_steps(begin: int, steps_of: int, level: int):
        step = run_folder.step(begin, loss=2 + 6 / (1 + begin / 1e4) + 0.05 * random.standard_normal(), seconds=1.0)
        values = index.numbers(step)
        return (float(end), 1e9 + begin), [values] if level == 0 else [values * 0.98, values * 1.02, values]

    for level in range(pyramid.LEVELS):
        shared = {"least": least, "keep": keep}
        write_level(folder / times.FOLDER, "codes", len(times.ROWS) * ranks, level, steps, of_ranks, **shared)
        write_level(folder / index.FOLDER, "numbers", len(index.VALUES), level, steps, of_steps, **shared)
    return folder
