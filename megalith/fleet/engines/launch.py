"""Input of every engine, and the command that each engine starts on each node."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from megalith.fleet.exit_codes import MEANINGS
from megalith.fleet.secure import key
from megalith.spec.run import RunSpec

FIXED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Makes torchrun use a fresh store for each start, because restarted ranks must not find the addresses of dead ranks."""

RETRYABLE = tuple(int(code) for code, meaning in MEANINGS.items() if meaning.retry)
"""Exit statuses after which the same command can make progress."""

HOPELESS = tuple(int(code) for code, meaning in MEANINGS.items() if not meaning.retry and code)
"""Exit statuses after which the same command would fail again."""


@dataclass(frozen=True)
class Launch:
    """Settings for the start of a run, in addition to its RunSpec. Paths are those on the machines, which share them. `ranks_per_node`
    ranks run on each node, which gives the number of nodes. `agent`: one agent is started per node, which starts the ranks itself; else
    torchrun starts every rank. `spares`: further nodes, which only agents can use. `grace`: seconds before the end in which a run that
    gets the signal may save. `restarts`: restarts of the whole job by the engine; `rank_restarts`: restarts by torchrun.
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
        """Nodes in the mesh, without spares."""
        return -(-spec.ranks // self.ranks_per_node)


@dataclass(frozen=True)
class Artefact:
    """A text to store in `file`, and the command that passes this file to the engine."""

    file: str
    text: str
    submit: str


def problems(spec: RunSpec, launch: Launch) -> list[str]:
    """Return all problems of a launch; empty if its artefact can be written."""
    found = []
    if launch.ranks_per_node < 1:
        return [f"ranks_per_node = {launch.ranks_per_node} starts nothing. Use 1 or more"]
    if spec.ranks % launch.ranks_per_node:
        found.append(
            f"ranks_per_node = {launch.ranks_per_node} does not divide the plan's {spec.ranks} ranks. Use a divisor: "
            "nodes of different sizes cannot replace each other"
        )
    if launch.spares and not launch.agent:
        found.append(f"spares = {launch.spares}, but torchrun starts every rank and has no use for them. Use agents, or 0")
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
            f"environment: {key.VARIABLE} would be readable by all in the artefact. Instead, name a key file by {key.FILE_VARIABLE}"
        )
    return found


def label(name: str) -> str:
    """Return a run's name in the form that DNS and schedulers accept: lower case letters, digits and dashes, at most 40
    characters."""
    kept = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return kept or "run"


def training(launch: Launch) -> list[str]:
    """Return the words after `python -m` in the command that starts each rank or each agent."""
    overrides = [word for text in launch.overrides for word in ("--set", text)]
    return ["megalith.cli", "agent" if launch.agent else "train", launch.run_file, "--run-dir", launch.run_dir, *overrides]


def before(launch: Launch) -> str:
    """Return a command that makes the run's key, which agents need, unless the key exists; empty without agents."""
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
    """Return the environment of every process. When torchrun is told to stop, it gives its ranks `grace` seconds to save."""
    return {**FIXED, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launch.grace), **launch.environment}


def exports(launch: Launch) -> str:
    """Return the environment as lines of shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables(launch).items())
