"""Kill all processes of a run across sites at random moments, resume it, and check what the run promises.

    python benchmarks/site_kills.py --file kills.jsonl          # six runs with five kills each
    python benchmarks/site_kills.py --quick                     # one run of each method with one kill

A case trains a small model with `megalith train`, kills its supervisors and ranks with signal 9 at random moments, and types the same
command again each time. In the end no sample may be missing from the merges that its logs have recorded, or be in them twice, and `megalith
replay` must make the same bits from them. A moment is drawn from a seed: a number of steps after the last start, up to EACH_STEPS, and a
pause. With 0 steps the kill hits a command that starts or resumes. Half of the cases are two sites with fragments in flight, the others
three sites whose merges are asynchronous. The file keeps finished cases, as benchmarks/cases.py says. Exit status 1 if a case breaks a
promise.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import cases
from megalith.events import RunStarted, Step, of_kind, read
from megalith.spec import files
from megalith.spec.phases import Phases
from megalith.spec.sites import at_site
from megalith.train.sites.record import merged_samples, recorded

STEPS, CASES, EACH = 60, 6, 5
EACH_STEPS = 9
"""The largest number of steps between a start and its kill."""
STARTING = 10.0  # seconds that a command takes at most to start, if nothing else runs
METHODS = {
    "streaming": "count = 2\ninner_steps = 4\nfragments = 2\noverlap = 3\nbits = 4\n",
    "asynchronous": "count = 3\ninner_steps = 4\nfragments = 2\noverlap = 1\nbits = 4\nstaleness = 1\n",
}
"""Tables `[sites]` by name."""
MARK = "MEGALITH_SITE_KILLS"  # in the environment of all processes of a case, by which they are found
SECONDS = 1800.0  # that a command may take


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="where finished cases are kept; default: nowhere")
    parser.add_argument("--runs", type=int, default=CASES)
    parser.add_argument("--kills", type=int, default=EACH, help="of each run")
    parser.add_argument("--quick", action="store_true", help="one run of each method with one kill")
    cases.add_arguments(parser)
    given = parser.parse_args()
    runs, kills = (len(METHODS), 1) if given.quick else (given.runs, given.kills)
    wanted = [([*METHODS][number % len(METHODS)], number, kills) for number in range(runs)]
    with cases.own_data() as data:
        rows = cases.finish(given.file, wanted, partial(measured, data), workers=given.workers)
    rows = [row for row in rows if tuple(row["case"]) in wanted]
    print("method        run  killed after step  resumed at     merges  undone  lost  doubled  same bits")
    for row in sorted(rows, key=lambda row: row["case"][1]):
        after, resumed = (" ".join(map(str, row[name])) for name in ("steps", "resumed"))
        print(
            f"{row['case'][0]:12s} {row['case'][1]:4d}  {after:17s}  {resumed:13s}  {row['merges']:6d}  {row['undone']:6d}  "
            f"{row['lost']:4d}  {row['doubled']:7d}  {row['same_bits']}"
        )
    broken = [row for row in rows if row["lost"] or row["doubled"] or not row["same_bits"]]
    print(f"{sum(len(row['steps']) for row in rows)} kills of {len(rows)} runs, of which {len(broken)} broke a promise")
    return 1 if broken else 0


def measured(data: Path, case: tuple[str, int, int]) -> dict[str, Any]:
    """Train, kill, resume and replay a case: method, seed and number of kills. Raises RuntimeError if a command fails."""
    method, number, kills = case
    draw = random.Random(number)
    moments = [
        (after, draw.uniform(0.0, 1.0 if after else STARTING)) for after in (draw.randint(0, EACH_STEPS) for _ in range(kills))
    ]
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name) / "run", Path(name) / "run.toml"
        file.write_text(_run_file(data, METHODS[method]), encoding="utf-8")
        steps = [_killed(file, folder, after=after, pause=pause) for after, pause in moments]
        _typed("train", str(file), "--run-dir", str(folder))
        answer = json.loads(_typed("replay", str(folder), "--json"))
        spec, made = files.load(file).spec, recorded([folder])
        read_by = Counter(merged_samples(at_site(spec), [made[number] for number in sorted(made)]))
        total = Phases.of(spec).after(0, spec.train.steps)
        starts = [event.resumed_step for event in of_kind(read(folder), RunStarted)]
        logged = sum(1 for event in read(folder) if event.kind == "merge")
    return {
        "steps": steps,
        "resumed": starts[1:],
        "merges": len(made),
        "undone": logged - len(made),
        "lost": sum(sample not in read_by for sample in range(total)),
        "doubled": sum(times > 1 or sample >= total for sample, times in read_by.items()),
        "same_bits": answer["ok"],
    }


def _run_file(data: Path, sites: str) -> str:
    return (
        '[model]\npreset = "tiny"\nlayers = 2\n'
        f'[data]\npath = "{data}"\n[sites]\n{sites}'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 12\nseq_len = 64\nprecision = "fp32"\n'
        "[optimizer]\nlr = 1e-3\nwarmup = 5\n[checkpoint]\nevery = 5\n[launch]\nthreads = 1\nstart_timeout = 900\n"
    )


def _killed(file: Path, folder: Path, *, after: int, pause: float) -> int:
    """Type the command, and kill all of its processes `pause` seconds after it has done `after` steps; return the last step in its
    log."""
    mark, before = secrets.token_hex(8), len(_steps(folder))
    command = [sys.executable, "-m", "megalith.cli", "train", str(file), "--run-dir", str(folder)]
    with (folder.parent / "killed.log").open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {MARK: mark})
    until = time.monotonic() + SECONDS
    try:
        while process.poll() is None and time.monotonic() < until and len(_steps(folder)) < before + after:
            time.sleep(0.1)
        time.sleep(pause)
    finally:
        while there := list(_processes(mark)):
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)
    return max(_steps(folder), default=0)


def _processes(mark: str) -> Iterator[int]:
    """Yield the processes that were started with a mark in their environment, and have not ended."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name)


def _steps(folder: Path) -> list[int]:
    """Return the steps in the log of the first site, in the order in which they were done."""
    return [event.step for event in of_kind(read(folder), Step)] if folder.exists() else []


def _typed(*words: str) -> str:
    command = [sys.executable, "-m", "megalith.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
