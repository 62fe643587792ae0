"""Finds this process's rank and rendezvous from the environment variables that its launcher set."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MEETING = "MEGALITH_MEETING"
"""Environment variable with the address of a running run's store, "tcp://HOST:PORT". An agent with this variable joins that run,
whatever its other variables are."""

FIRST_PORT, PORTS = 15_000, 15_000  # below the range from which Linux hands out ports for outgoing connections


@dataclass(frozen=True)
class Place:
    """A rank among the `world` ranks of a run, with its number among the `local_world` ranks of its machine. `store` is the
    address of the ranks' rendezvous: "file://PATH" (a FileStore; PATH is used unchanged), "megalith://HOST:PORT" (the
    authenticated store of a run with agents) or "tcp://HOST:PORT" (a TCPStore, which this rank serves itself if `serves`). Every
    key must be prefixed with `generation`, because under torchrun the store outlives the ranks: with gloo, restarted ranks would
    otherwise read the addresses of dead ranks and never connect (torch 2.15 reuses the store and no longer adds a prefix).
    `generation` None: the launcher provides no number that is equal on all machines and new at every start, so the ranks must
    agree on a name (`rendezvous.agree`). `engine_serves`: the launcher serves the store, which may still contain keys of earlier
    starts.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    kind: Literal["local", "torchrun", "slurm", "variables"]
    store: str
    generation: str | None
    serves: bool = False
    engine_serves: bool = False


def find(environment: Mapping[str, str] = os.environ, *, alone: bool = False) -> Place | None:
    """Return the place of this process if it was started as a rank by Megalith's supervisor, torchrun, Slurm's `srun` or a
    launcher that sets RANK.

    None: the process is not a rank, so it may start ranks. The result is also None in a Slurm batch script. Unless `alone`, the
    result is also None if srun or a launcher that sets RANK (but not torchrun) started only one process, which may then start
    ranks itself. `alone`: a single process is also a rank, as an agent on a single machine is. Raises ValueError if the
    environment is incomplete, because each process would otherwise train alone.
    """
    if "MEGALITH_STORE" in environment:
        return _local(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        return _torchrun(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _variables(environment, alone=alone)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _slurm(environment, alone=alone)
    return None


def _require(environment: Mapping[str, str], launcher: str, *names: str) -> None:
    problems = [f"{name} is not set" for name in names if name not in environment]
    numbers = [name for name in names if name not in ("MASTER_ADDR", "MEGALITH_GENERATION")]
    problems += [f"{name}={environment[name]} is not a number" for name in numbers if not environment.get(name, "0").isdecimal()]
    if problems:
        raise ValueError(
            f"some environment variables are those of {launcher}, but {', '.join(problems)}. "
            f"Start the ranks with {launcher}, or unset these variables to let this command start the ranks"
        )


def _checked(place: Place) -> Place:
    problems = []
    if not place.rank < place.world:
        problems.append(f"rank {place.rank} does not exist in a run of {place.world} ranks")
    if not place.local_rank < place.local_world:
        problems.append(f"local rank {place.local_rank} does not exist on a machine with {place.local_world} ranks")
    if place.local_world > place.world:
        problems.append(f"this machine has {place.local_world} ranks, but the whole run has only {place.world}")
    if problems:
        reason = "; ".join(problems)
        raise ValueError(
            f"the environment variables of the launcher ({place.kind}) contradict each other: {reason}. Unset or correct them"
        )
    return place


def _local(environment: Mapping[str, str]) -> Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    _require(environment, "megalith", *names, "MEGALITH_GENERATION")
    rank, world, local_rank, local_world = (int(environment[name]) for name in names)
    store, generation = environment["MEGALITH_STORE"], environment["MEGALITH_GENERATION"]
    return _checked(Place(rank, world, local_rank, local_world, "local", store, generation))


def _torchrun(environment: Mapping[str, str]) -> Place:
    """Return the place of a rank of TorchElastic, whose agent serves the store if TORCHELASTIC_USE_AGENT_STORE is True. The place
    has no generation, because TORCHELASTIC_RESTART_COUNT may differ between machines.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    _require(environment, "torchrun", *names, "MASTER_ADDR", "MASTER_PORT")
    rank, world, local_rank, local_world = (int(environment[name]) for name in names)
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    serves = rank == 0 and not agent_serves
    return _checked(Place(rank, world, local_rank, local_world, "torchrun", _tcp(environment), None, serves, agent_serves))


def _variables(environment: Mapping[str, str], *, alone: bool) -> Place | None:
    """Return the place of a rank whose launcher sets the variables of torch's `env://`, as Kubernetes operators do."""
    if not alone and environment.get("WORLD_SIZE") == "1" and environment.get("RANK", "0") == "0":
        return None
    local = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in environment]
    _require(environment, "a launcher", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *local)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local_rank, local_world = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    place = Place(rank, world, local_rank, local_world, "variables", _tcp(environment), "0", serves=rank == 0)
    return _checked(place)


def _tcp(environment: Mapping[str, str]) -> str:
    host = environment["MASTER_ADDR"]
    return f"tcp://{f'[{host}]' if ':' in host else host}:{environment['MASTER_PORT']}"


def _slurm(environment: Mapping[str, str], *, alone: bool) -> Place | None:
    """Return the place of a task of `srun`. Unless MASTER_ADDR or MASTER_PORT is set, the rendezvous is on the first machine of the
    Slurm step, at a port computed from the numbers of job and step."""
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    names = ("SLURM_PROCID", tasks_name, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    _require(environment, "srun", *names)
    rank, world, local_rank, node, job, step = (int(environment[name]) for name in names)
    if world == 1 and not alone:
        return None
    nodes = _either(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    tasks = expand_tasks(_either(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if node >= len(tasks):
        raise ValueError(f"SLURM_NODEID={node}, but tasks are given for {len(tasks)} machines. Start the ranks with srun")
    host = environment.get("MASTER_ADDR") or expand_nodes(nodes)[0]
    port = environment.get("MASTER_PORT") or str(FIRST_PORT + (job * 31 + step) % PORTS)
    generation = f"{job}.{step}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    store = _tcp({"MASTER_ADDR": host, "MASTER_PORT": port})
    return _checked(Place(rank, world, local_rank, tasks[node], "slurm", store, generation, serves=rank == 0))


def _either(environment: Mapping[str, str], first: str, second: str) -> str:
    value = environment.get(first) or environment.get(second)
    if not value:
        raise ValueError(f"the environment looks like srun's, but neither {first} nor {second} is set. Start the ranks with srun")
    return value


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each machine from Slurm's short form, in which "4(x2),3" means [4, 4, 3]. Raises ValueError
    for other text."""
    tasks: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not found:
            raise ValueError(f"{item!r} in {text!r} is not a number of tasks in Slurm's form. Use a form such as 4(x2),3")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def expand_nodes(text: str) -> list[str]:
    """Return the machines of a Slurm node list, in order: "node[01-03,07],gpu5" means node01, node02, node03, node07, gpu5. A
    name may have several brackets, of which the last varies fastest. Numbers keep their leading zeros. Raises ValueError for
    other text.
    """
    return [name for item in _split(text) for name in _expand(item, text)]


def _split(text: str) -> list[str]:
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise ValueError(f"{text!r} is not a node list in Slurm's form. Use a form such as node[01-03,07],gpu5")
    return items


def _expand(item: str, text: str) -> list[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, after = rest.partition("]")
    ends = _expand(after, text)
    return [f"{before}{number}{end}" for piece in ranges.split(",") for number in _numbers(piece, text) for end in ends]


def _numbers(piece: str, text: str) -> list[str]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
    first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
    if int(last) < int(first):
        raise ValueError(f"[{piece}] in {text!r} is not a range of machines. Use a form such as node[01-03,07],gpu5")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
