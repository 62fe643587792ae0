"""Settings of a launch, which all engines share, and the command that an engine starts on each node."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from megalith.fleet.exit_codes import MEANINGS
from megalith.fleet.secure import key
from megalith.spec.run import RunSpec

FIXED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment variable that makes torchrun use a new store for each start, so that restarted ranks never read the addresses of
dead ranks."""

RETRYABLE = tuple(int(code) for code, meaning in MEANINGS.items() if meaning.retry)
"""Exit statuses after which a restart with the same command can make progress."""

HOPELESS = tuple(int(code) for code, meaning in MEANINGS.items() if not meaning.retry and code)
"""Exit statuses after which a restart with the same command would most likely fail again."""


@dataclass(frozen=True)
class Launch:
    """Settings with which a run is started, in addition to its RunSpec. Paths are on storage that all machines share.
    `ranks_per_node`: ranks on each node, from which the number of nodes is computed. `agent`: an agent on each node starts the
    node's ranks; otherwise torchrun does. `spares`: number of spare nodes, which only agents can use. `grace`: seconds between
    the signal to stop and the end of the job, in which the run saves. `restarts`: how often the engine restarts the whole job;
    `rank_restarts`: how often torchrun restarts the ranks.
    """

    run_file: str
    run_dir: str
    ranks_per_node: int
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    spares: int = 0
    agent: bool = False
    grace: int = 300
    restarts: int = 20
    rank_restarts: int = 3
    port: int = 29_500
    hours: float | None = None
    workdir: str | None = None
    image: str | None = None
    partition: str | None = None
    account: str | None = None
    namespace: str | None = None
    volume: str | None = None
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def nodes(self, spec: RunSpec) -> int:
        """Number of nodes in the mesh, without spares."""
        return -(-spec.ranks // self.ranks_per_node)


@dataclass(frozen=True)
class Artefact:
    """A file for an engine: its text, its name, and the command that passes it to the engine."""

    file: str
    text: str
    submit: str


def problems(spec: RunSpec, launch: Launch) -> list[str]:
    """Return all problems of a launch; empty if there are none."""
    found = []
    if launch.ranks_per_node < 1:
        return [f"ranks_per_node = {launch.ranks_per_node} starts nothing. Use 1 or more"]
    if spec.ranks % launch.ranks_per_node:
        found.append(
            f"ranks_per_node = {launch.ranks_per_node} does not divide the plan's {spec.ranks} ranks. Use a divisor "
            f"of {spec.ranks}: nodes with different numbers of ranks cannot replace each other"
        )
    if launch.spares and not launch.agent:
        found.append(
            f"spares = {launch.spares}, but torchrun, which starts the ranks here, cannot use spare nodes. Use agent = True, or spares = 0"
        )
    if launch.gpus_per_node and launch.gpus_per_node < launch.ranks_per_node:
        found.append(
            f"gpus_per_node = {launch.gpus_per_node} are fewer than ranks_per_node = {launch.ranks_per_node}. One rank uses one GPU"
        )
    for name in ("spares", "grace", "restarts", "rank_restarts"):
        if getattr(launch, name) < 0:
            found.append(f"{name} = {getattr(launch, name)} is below 0. Use 0 or more")
    wrong = [name for name in launch.environment if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    found += [f"environment: {name!r} is not the name of a variable. Use letters, digits and underscores" for name in wrong]
    if key.VARIABLE in launch.environment:
        found.append(
            f"environment: {key.VARIABLE} would be readable by everyone in this file. Instead, set {key.FILE_VARIABLE} to the "
            f"path of a key file"
        )
    return found


def label(name: str) -> str:
    """Return a run's name in the form that DNS and schedulers accept: lower case letters, digits and dashes, at most 40
    characters."""
    kept = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return kept or "run"


def training(launch: Launch) -> list[str]:
    """Return the arguments of `python -m` that start a rank, or an agent."""
    overrides = [word for text in launch.overrides for word in ("--set", text)]
    return ["megalith.cli", "agent" if launch.agent else "train", launch.run_file, "--run-dir", launch.run_dir, *overrides]


def before(launch: Launch) -> str:
    """Return a command that creates the run's key if it does not exist, because agents need the key; empty without agents."""
    return shlex.join(["python", "-m", "megalith.cli", "key", launch.run_dir]) if launch.agent else ""


def torchrun(spec: RunSpec, launch: Launch, *, endpoint: str) -> str:
    """Return torchrun's command line for one node. `endpoint` may contain a shell variable; all other words are quoted."""
    nodes = launch.nodes(spec)
    several = f"{nodes}:{nodes + launch.spares}" if launch.spares else str(nodes)
    processes, restarts = (1, 0) if launch.agent else (launch.ranks_per_node, launch.rank_restarts)  # agents see to restarts
    words = [
        "torchrun", "--nnodes", several, "--nproc-per-node", str(processes),
        "--rdzv-backend", "c10d", "--rdzv-id", label(spec.name), "--rdzv-endpoint", None, "--max-restarts", str(restarts), "-m",
        *training(launch),
    ]  # fmt: skip
    return " ".join(endpoint if word is None else shlex.quote(word) for word in words)


def variables(launch: Launch) -> dict[str, str]:
    """Return the environment variables of every process. One of these variables makes torchrun wait `grace` seconds for its ranks
    to save when it is stopped."""
    return {**FIXED, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launch.grace), **launch.environment}


def exports(launch: Launch) -> str:
    """Return the environment as lines of shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables(launch).items())
