"""Measure the cost of the live page: for the server that follows a run, and for the run itself.

    python benchmarks/live_page.py follow --seconds 60         # ten million steps on 16,384 ranks, and a new one each second
    python benchmarks/live_page.py train --pairs 20            # four real ranks, watched and not, in turn

`follow` prints the server's share of one core, from its processor time, and its peak memory: with no page open, and with one page that
requests all panels whenever there is news. `train` trains the quickstart model (its data: `make quickstart`) beside a
server with an open page. The server runs in one block of steps and is stopped (SIGSTOP) in the next. The cost is the median over pairs of
neighbouring blocks of one block's mean step over the other's, with the interval that holds 95 % of the medians of pairs drawn again.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from megalith import epochs, pyramid
from megalith.control import times
from megalith.events.log import FILE, EventLog
from megalith.watch.panels import PANELS
from tests.report import run_folder
from tests.watch import synthetic

ROOT = Path(__file__).resolve().parents[1]
STEPS, DATA, PIPELINE, TENSOR = 10_000_000, 256, 8, 8
ENDLESS = 1_000_000  # steps: the run is stopped when it was measured
QUICK, REST = ("alive", "loss", "speed", "rank-heatmap"), 5.0  # as page.js asks: these at each news, all so often
LIVE = (
    *QUICK, "what-if", "memory", "experts", "precision", "sites", "incidents", "samples", "run",
)  # fmt: skip


class Watched:
    """A server in a process of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megalith.cli", "watch", str(run_dir)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        self.standing: dict[str, tuple[float, Any]] = {}  # panel -> time until which its answer is valid, and the answer

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def most_resident(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def ask(self, name: str) -> Any:
        """Request panels as the page does, leaving out those whose answer is still valid."""
        until, found = self.standing.get(name, (0.0, None))
        if time.monotonic() >= until:
            with urllib.request.urlopen(f"{self.address}panel/{name}?run=0&columns=130") as answer:
                found = json.load(answer)
                self.standing[name] = time.monotonic() + float(answer.headers["X-Megalith-Stands"]), found
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def page(server: Watched) -> Iterator[None]:
    """Keep a page open that requests panels at each news, at most once a second."""
    done = threading.Event()
    with contextlib.closing(urllib.request.urlopen(server.address)) as whole:
        whole.read()

    def follow() -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.address}news") as news:
            seen, last, whole = b"", 0.0, 0.0
            while not done.is_set():
                line = news.readline()
                if line.startswith(b"data:") and line != seen:
                    seen = line
                    done.wait(max(0.0, 1.0 - (time.monotonic() - last)))
                    last = time.monotonic()
                    asked = QUICK if last - whole < REST else LIVE
                    whole = last if asked is LIVE else whole
                    for name in asked:
                        server.ask(name)

    threading.Thread(target=follow, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def follow(seconds: float) -> dict[str, Any]:
    """Measure the server on a long, large run that is still training."""
    assert tuple(PANELS) == LIVE, "the page asks for every panel"
    with tempfile.TemporaryDirectory() as folder:
        run = synthetic.write(Path(folder) / "run", steps=STEPS, data=DATA, pipeline=PIPELINE, tensor=TENSOR, slow=777, keep=0)
        server = Watched(run)
        try:
            while server.ask("alive")["behind"]:
                time.sleep(0.5)
            ranks = pyramid.Writer(run / times.FOLDER, kind="codes", width=len(times.ROWS) * DATA * PIPELINE * TENSOR)
            log, random, number = EventLog(run), np.random.default_rng(0), STEPS
            found: dict[str, Any] = {}
            for name, opened in (("no page open", contextlib.nullcontext()), ("a page open", page(server))):
                with opened:
                    begun, before = time.monotonic(), server.processor_seconds()
                    for second in range(1, round(seconds) + 1):
                        number += 1
                        codes = times.encode(1 + 0.03 * random.standard_normal(len(times.ROWS) * DATA * PIPELINE * TENSOR))
                        ranks.append(number, codes, bases=(0.5, 4e10))
                        log.write(run_folder.step(number, loss=2.0, seconds=1.0, time=time.time()))
                        time.sleep(max(0.0, begun + second - time.monotonic()))
                    taken = server.processor_seconds() - before
                    found[name] = taken / (time.monotonic() - begun)
            return found | {"most_resident": server.most_resident()}
        finally:
            server.close()


def train(pairs: int, block: int, recipe: Path, settings: list[str]) -> dict[str, Any]:
    """Measure a run that is watched and not, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"train.steps={ENDLESS}", f"validation.every={ENDLESS}", f"checkpoint.every={ENDLESS}", *settings]
        command = [sys.executable, "-m", "megalith.cli", "train", str(recipe), "--run-dir", str(run)]
        command += [word for one in settings for word in ("--set", one)]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        try:
            log = Log(run, training)
            log.block(10)
            server = Watched(run)
            try:
                with page(server):
                    log.block(2 * block)  # it reads what there is, and predicts
                    began = server.processor_seconds()
                    ratios, seconds = [], 0.0
                    for pair in range(pairs):
                        means = {}
                        for watched in (True, False) if pair % 2 else (False, True):
                            server.process.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
                            took = log.block(block)
                            means[watched] = statistics.fmean(took)
                            seconds += sum(took) if watched else 0.0
                        ratios.append(means[True] / means[False])
                    server.process.send_signal(signal.SIGCONT)
                    share = (server.processor_seconds() - began) / seconds
            finally:
                server.close()
        finally:
            training.terminate()
            training.wait()
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975)).tolist()
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": pairs, "server_share": share, "began": began}


class Log:
    """Seconds of the steps of a run that trains, read as they are logged."""

    def __init__(self, run: Path, training: "subprocess.Popen[bytes]") -> None:
        self.run, self.training, self.place = run, training, 0
        self.seconds: dict[int, float] = {}

    def last(self) -> int:
        """Return the last step that is logged."""
        with contextlib.suppress(FileNotFoundError), epochs.newest(self.run, FILE).open("rb") as log:
            log.seek(self.place)
            whole = log.read().rpartition(b"\n")[0]
            self.place += len(whole) + bool(whole)
            found = [json.loads(line) for line in whole.splitlines()]
            self.seconds |= {one["step"]: one["seconds"] for one in found if one["type"] == "step"}
        return max(self.seconds, default=0)

    def block(self, steps: int) -> list[float]:
        """Wait for so many steps after the one that is under way, and return their seconds."""
        first = self.last() + 2
        while self.last() < first + steps - 1:
            if self.training.poll() is not None:
                raise RuntimeError(f"training ended with status {self.training.returncode}; `make quickstart` prepares its data")
            time.sleep(0.2)
        return [self.seconds[step] for step in range(first, first + steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("follow", "train"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement of `follow`")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks of `train`")
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/quickstart.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe of `train`")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = follow(given.seconds) if given.what == "follow" else train(given.pairs, given.block, given.recipe, given.set)
    if given.json:
        print(json.dumps(found))
    elif given.what == "follow":
        shares = ", ".join(f"{100 * found[name]:.2f} % of a core with {name}" for name in ("no page open", "a page open"))
        print(f"{STEPS:,} steps, {DATA * PIPELINE * TENSOR:,} ranks: {shares}; {found['most_resident'] / 1e6:.0f} MB at the peak")
    else:
        print(
            f"a watched step takes {100 * (found['ratio'] - 1):+.2f} % ({100 * (found['low'] - 1):+.2f} to "
            f"{100 * (found['high'] - 1):+.2f} %; {found['pairs']} pairs); the server takes {100 * found['server_share']:.2f} % of a core, "
            f"after {found['began']:.1f} processor seconds to begin"
        )


if __name__ == "__main__":
    main()
