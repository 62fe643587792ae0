"""Machines are lost in realistic ways. A spare takes over, or the run waits, and no bit of the result changes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalith.events import Incident, Kind, RunFinished, Step, read
from megalith.machine.networks import missing
from megalith.spec.files import load
from tests.namespaces import Machine, machines
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, position, prepare_text, train

RUN = """
name = "nodes"
model = {{ layers = 2, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 2, zero = 3 }}
data.path = "{data}"
train = {{ steps = 200, global_batch = 8, seq_len = 32, precision = "fp32" }}
optimizer.warmup = 2
checkpoint.every = 100
launch = {{ threads = 1, start_timeout = 250.0, timeout = 120.0 }}
fleet = {{ nodes = 2, spares = 1, node_timeout = 20.0, hang_floor = 60.0 }}
"""
PORT = 29_500  # an address inside the network namespace


class Run:
    """A run on several machines, seen through its event log."""

    def __init__(self, folder: Path, run_file: Path) -> None:
        self.folder, self.run_file, self.seen = folder, run_file, 0
        self.log = folder.with_suffix(".log")
        quiet = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
        self.environment = quiet | {"OMP_NUM_THREADS": "1"}

    def agent(self, machine: Machine) -> list[str]:
        run = [str(self.run_file), "--run-dir", str(self.folder), "--machine", machine.name]
        return ["-m", "megalith.cli", "agent", *run]

    def torchrun(self, machine: Machine, *, head: Machine, nodes: int) -> subprocess.Popen[bytes]:
        """Start an agent under torchrun. Here the host name does not tell which machine it is on."""
        words = f"--nnodes {nodes} --nproc-per-node 1 --max-restarts 0 --rdzv-backend c10d --rdzv-endpoint {head.address}:{PORT}"
        place = f"--rdzv-conf is_host={int(machine == head)} --local-addr {machine.address}"
        command = [sys.executable, "-m", "torch.distributed.run", *words.split(), *place.split(), *self.agent(machine)]
        return machine.start(command, log=self.log, environment=self.environment)

    def join(self, machine: Machine) -> subprocess.Popen[bytes]:
        """Start an agent by hand, on a machine that the engine does not know."""
        meeting = self.said("agents meet at ").split()[0]
        environment = self.environment | {"MEGALITH_MEETING": meeting}
        return machine.start([sys.executable, *self.agent(machine)], log=self.log, environment=environment)

    def said(self, words: str) -> str:
        """Return the text after these words in the output of the processes."""
        return self.log.read_text().partition(words)[2]

    def await_event(self, kind: type[Kind], fits: Callable[[Kind], bool] = lambda event: True) -> Kind:
        """Return the next matching event of a class. Each event is considered once."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            events = list(read(self.folder))
            for event in events[self.seen :]:
                self.seen += 1
                if isinstance(event, kind) and fits(event):
                    return event
            time.sleep(0.05)
        raise AssertionError(f"did not come:\n{self.log.read_text()[-5000:]}")

    def await_loss(self, machine: Machine) -> Incident:
        return self.await_event(Incident, lambda event: machine.name in event.evidence.get("nodes", ()))

    def await_step(self) -> int:
        """Wait until all ranks make progress after the events seen so far."""
        return self.await_event(Step).step


@pytest.mark.engines
@pytest.mark.timeout(PATIENCE)
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_machines_are_lost_and_come_back_and_no_bit_changes(tmp_path: Path) -> None:
    """Two machines and a spare under torchrun: an agent is killed, a cable pulled, a machine powered off. All in one run, since each
    start costs imports."""
    (tmp_path / "run.toml").write_text(RUN.format(data=prepare_text(tmp_path)))
    train(load(tmp_path / "run.toml").spec, tmp_path / "whole")
    with machines(["a", "b", "c"]) as (a, b, c):
        subprocess.run([sys.executable, "-m", "megalith.cli", "key", str(tmp_path / "hurt")], check=True)
        run = Run(tmp_path / "hurt", tmp_path / "run.toml")
        started = [run.torchrun(machine, head=a, nodes=3) for machine in (a, b, c)]

        run.await_step()
        [agent] = [
            process for process, line in b.processes().items() if "megalith.cli agent" in line and "torch.distributed" not in line
        ]
        os.kill(agent, signal.SIGKILL)
        lost = run.await_loss(b)
        assert lost.cause == "nodes_lost"
        assert {"slot": 1, "node": "b", "spare": "c"}.items() <= _command(lost, "replace").items()
        assert _command(lost, "restart")["placement"] == ["a", "c"]
        run.await_step()

        c.plug(connected=False)
        assert "no spare" in run.await_loss(c).reason
        c.plug(connected=True)  # its agent has ended its ranks, and offers the machine again
        run.await_step()

        c.kill()
        assert "no spare" in run.await_loss(c).reason
        run.join(b)
        run.await_step()
        run.await_event(RunFinished)
        assert started[0].poll() is None, "torchrun waits for the machines that are gone"
    assert_same_bits(final_state(tmp_path / "whole"), final_state(tmp_path / "hurt"))
    assert position(tmp_path / "whole") == position(tmp_path / "hurt")


def _command(incident: Incident, kind: str) -> dict[str, Any]:
    """Return one of the commands that followed an incident."""
    return next(command for command in incident.commands if command["kind"] == kind)
