"""A Slurm cluster of one node for tests: Debian's daemons, with keys, folders and ports of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "srun")
SEARCH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_SECONDS = 120.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
PropagatePrioProcess=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdTimeout=10
KillWait=120
ReturnToService=2
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return the reason why Slurm cannot run here, or None if it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if lacking:
        return f"needs Slurm (make engines, or apt install slurmctld slurmd slurm-client munge): there is no {', '.join(lacking)}"
    return "needs root, as whom Slurm's daemons run" if os.geteuid() != 0 else None


class Cluster:
    """A running Slurm cluster, used through its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}

    def begin(self) -> None:
        """Start all daemons, and wait for the node. Skips the test, with the reason, if they cannot run, as in some
        containers."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        ports = {"controller": _free_port(), "daemon": _free_port()}
        text = CONFIGURATION.format(host=host, folder=self.folder, cores=os.cpu_count(), **ports)
        (self.folder / "slurm.conf").write_text(text)
        munge = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "seed",
        }
        options = [f"--{name}={self.folder / file}" for name, file in munge.items()]
        self._start("munged", "--foreground", "--force", *options)
        self._await(lambda: (self.folder / "munge.socket").exists())
        self._start("slurmctld", "-D")
        self.power_on()
        self._await(lambda: self.node_is("idle"))

    def _await(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                outputs = [(self.folder / f"{name}.out").read_text()[-500:] for name in ended or self._daemons]
                # these daemons need rights (cgroups, host names) that some containers lack
                pytest.skip(f"Slurm does not run here: {' '.join(ended) or 'no node'}: {' '.join(outputs)}")
            time.sleep(0.1)

    def node_is(self, state: str) -> bool:
        """Wait until Slurm reports this state of its node, once its controller answers."""
        done = subprocess.run(["sinfo", "-h", "-o", "%t"], env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.startswith(state)

    def power_on(self) -> None:
        """Start the node's daemon."""
        self._start("slurmd", "-D")

    def power_off(self) -> None:
        """Kill the node's daemon and all processes that Slurm started there."""
        daemon = self._daemons.pop("slurmd")
        for process in (daemon.pid, *self.steps()):
            for one in _with_descendants(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        daemon.wait()

    def steps(self) -> list[int]:
        """Return the process ids of the daemons of this cluster's job steps, which are the parents of all job processes."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                mine = f"SLURM_CONF={self.folder}/slurm.conf".encode() in environ.read_bytes().split(b"\0")
                if mine and (environ.parent / "comm").read_text().startswith("slurmstepd"):
                    found.append(int(environ.parent.name))
        return found

    def say(self, *command: str) -> str:
        """Return the output of a Slurm command. Raises with its error output if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """Return a field of a job from Slurm: "JobState", "Restarts" and so on."""
        words = dict(word.split("=", 1) for word in self.say("scontrol", "show", "job", job).split() if "=" in word)
        return words[name]

    def end(self) -> None:
        """Kill all processes that this cluster started."""
        with contextlib.suppress(KeyError):
            self.power_off()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.out").open("ab") as out:
            path = shutil.which(program, path=SEARCH) or program
            command = [path, *arguments]
            self._daemons[program] = subprocess.Popen(command, env=self.environment, stdout=out, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Run a Slurm cluster with its files in `folder` while the block runs."""
    folder.mkdir(parents=True)
    cluster = Cluster(folder)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()


def _with_descendants(process: int) -> list[int]:
    children = [one for listing in Path(f"/proc/{process}/task").glob("*/children") for one in listing.read_text().split()]
    return [process, *(one for child in children for one in _with_descendants(int(child)))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
