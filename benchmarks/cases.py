"""Run the cases of a long benchmark, several at a time, and keep each finished one.

The file has one JSON object on each line: the case, its result, and the commit and machine that gave it. Cases in the file are not run
again, so a benchmark that was stopped goes on where it was. The table is printed from the file.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megalith.data.prepare import prepare
from megalith.data.tokenizer import load as load_tokenizer
from megalith.machine.describe import describe

LONGEST_SECONDS = 12 * 3600.0
"""Seconds after which a case that trains for long is given up: many times what it takes on an idle machine."""
Row = dict[str, Any]
Measure = Callable[[Any], Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser, *, device: bool = False) -> None:
    """Add `--workers`, and `--device` if the benchmark runs on GPUs too."""
    parser.add_argument("--workers", type=int, default=1, help="cases at a time")
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


@contextmanager
def own_data() -> Iterator[Path]:
    """Prepare data/austen-bytes, which the docs' commands name, in a folder that is removed at the end of the context."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare(["bundled:austen"], tokenizer=load_tokenizer("bytes"), out=data, validation=0.03)
        yield data


@contextmanager
def data_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Iterator[str]:
    """Yield the folder of the data that `--data` names, or, with `--quick`, data of its own. Ends with a usage error without either."""
    if given.quick:
        with own_data() as data:
            yield str(data)
    elif given.data is None:
        parser.error("name the prepared data with --data")
    else:
        yield given.data


def kept(file: Path | None) -> list[Row]:
    """Return the finished cases of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file and file.exists() else []


def finish(file: Path | None, cases: Sequence[Any], measure: Measure, *, workers: int = 1, device: str = "cpu") -> list[Row]:
    """Measure the cases that the file does not have; return all its rows and the new ones. `measure` runs in a forked process, so the
    parent must not have used a GPU, nor more than one thread of torch."""
    rows = kept(file)
    done = {json.dumps(row["case"]) for row in rows}
    missing = [case for case in cases if json.dumps(case) not in done]
    began = time.monotonic()
    for number, (case, found) in enumerate(_measured(missing, measure, workers), 1):
        row = {"case": json.loads(json.dumps(case)), **found, "commit": commit(), "machine": machine(device)}
        rows.append(row)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        left = (time.monotonic() - began) / number * (len(missing) - number) / 60
        print(f"{number} of {len(missing)}, {left:.0f} min left: {json.dumps(case)}", file=sys.stderr, flush=True)
    return rows


def _measured(cases: Sequence[Any], measure: Measure, workers: int) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield each case and its result, in the order in which they finish."""
    if workers == 1:
        yield from ((case, measure(case)) for case in cases)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap_unordered(partial(_with_case, measure), cases)


def _with_case(measure: Measure, case: Any) -> tuple[Any, Mapping[str, Any]]:
    return case, measure(case)


@cache
def commit() -> str:
    """Return the commit of these sources; empty outside a repository."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


@cache
def machine(device: str = "cpu") -> str:
    """Return the processor or the GPU, and the version of torch."""
    found = describe()
    name = found.gpus[0].name if device == "cuda" and found.gpus else f"{found.processor}, {found.processors} cores"
    return f"{name}, torch {torch.__version__}"
