"""Settings of a launch from the command line's options and the run. All contradictions are reported at once."""

from collections.abc import Mapping
from typing import Any

from megalith.fleet.engines.launch import Launch, problems
from megalith.spec import cluster as clusters
from megalith.spec.cluster import ClusterSpec
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec

SEVERAL = ("torchrun", "slurm", "k8s", "ray")
ALLOCATES = ("slurm", "k8s", "ray")

USED_BY: Mapping[str, tuple[str, ...]] = {
    "nodes": SEVERAL, "ranks_per_node": SEVERAL, "grace": SEVERAL, "gpus_per_node": ALLOCATES, "cpus_per_node": ALLOCATES,
    "restarts": ALLOCATES, "hours": ("slurm",), "partition": ("slurm",), "account": ("slurm",), "image": ("k8s",),
    "namespace": ("k8s",), "volume": ("k8s",),
}  # fmt: skip
"""Options that only some engines use. An engine refuses an option that it does not use, instead of ignoring it."""


def given(spec: RunSpec, engine: str, *, run_file: str, run_dir: str, **options: Any) -> tuple[Launch, list[Problem]]:
    """Return the launch and advice about it. `options`: the number of `nodes`, and fields of `Launch`; an option that was not
    given is None. Raises SpecErrors with all problems. `engine` must be one of `ENGINES`.
    """
    said = {name: value for name, value in options.items() if value is not None}
    found = [_unused(name, said.pop(name), engine) for name in list(said) if engine not in USED_BY.get(name, (engine,))]
    if engine == "k8s" and "image" not in said:
        way_out = "Give --image REGISTRY/NAME:TAG, an image in which `python -m megalith.cli` runs."
        found.append(Problem("error", "--image", None, "pods need a container image that contains Megalith", way_out))
    cluster = _cluster(spec)
    nodes = said.pop("nodes", None)
    if engine in SEVERAL and spec.fleet.nodes > 1:
        if nodes not in (None, spec.fleet.nodes):
            way_out = f"Leave out --nodes, or use --set fleet.nodes={nodes}."
            found.append(Problem("error", "--nodes", nodes, f"the run has fleet.nodes = {spec.fleet.nodes}", way_out))
        nodes, said["agent"], said["spares"] = spec.fleet.nodes, True, spec.fleet.spares
    ranks = _ranks_per_node(spec, engine, nodes, said.pop("ranks_per_node", None), cluster)
    if isinstance(ranks, Problem):
        raise SpecErrors([*found, ranks])
    advice: list[Problem] = []
    if engine in ALLOCATES and "gpus_per_node" not in said:
        said["gpus_per_node"] = ranks if _on_gpus(spec, cluster) else 0
        if not said["gpus_per_node"] and spec.train.device != "cpu":
            way_out = f"If the ranks need GPUs, give --gpus-per-node {ranks}, or name the cluster in the run file."
            advice.append(
                Problem(
                    "advice",
                    "--gpus-per-node",
                    0,
                    "no GPUs are requested, because neither the run file nor an option asks for any",
                    way_out,
                )
            )
    launch = Launch(run_file=run_file, run_dir=run_dir, ranks_per_node=ranks, **said)
    if launch.hours is not None and launch.hours * 3600 <= launch.grace:
        reason = (
            f"the time limit of {launch.hours * 3600:g} s leaves no time for training, because the run needs the last "
            f"{launch.grace} s to save"
        )
        found.append(Problem("error", "--hours", launch.hours, reason, "Give more hours, or a shorter --grace."))
    found += [_problem(text) for text in problems(spec, launch)]
    if found:
        raise SpecErrors(found)
    return launch, [*advice, *(_advice_on_pods(launch) if engine == "k8s" else [])]


def _unused(name: str, value: Any, engine: str) -> Problem:
    option, users = _option(name), USED_BY[name]
    reason = f"engine {engine!r} does not use this option"
    if name in ("nodes", "ranks_per_node"):
        reason = f"engine {engine!r} starts all ranks of the plan on one machine"
    return Problem("error", option, value, reason, f"Leave out {option}, or use --engine {' or '.join(users)}.")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _problem(text: str) -> Problem:
    reason, _, way_out = text.partition(". ")
    return Problem("error", "launch", None, reason, f"{way_out}.")


def _cluster(spec: RunSpec) -> ClusterSpec | None:
    return None if spec.cluster == "local" else clusters.load(spec.cluster)


def _ranks_per_node(
    spec: RunSpec, engine: str, nodes: int | None, asked: int | None, cluster: ClusterSpec | None
) -> int | Problem:
    ranks = spec.ranks
    if engine not in SEVERAL:
        return ranks
    if nodes is not None and asked is not None and nodes * asked != ranks:
        reason = f"{nodes} nodes with {asked} ranks each have {nodes * asked} ranks, but the plan has {ranks}"
        return Problem(
            "error",
            "--nodes",
            nodes,
            reason,
            "Give only one of --nodes and --ranks-per-node, and neither if fleet.nodes > 1: the rest is computed from the plan.",
        )
    if asked is not None:
        return asked
    if nodes is not None:
        if nodes < 1 or ranks % nodes:
            reason = f"{ranks} ranks cannot be divided evenly among {nodes} nodes"
            return Problem("error", "--nodes", nodes, reason, f"Use a number of nodes that divides {ranks}, or another plan.")
        return ranks // nodes
    if cluster is not None:
        return min(ranks, cluster.per_node)
    reason = f"it is not known how many of the plan's {ranks} ranks run on each node, because the run names no cluster"
    return Problem("error", "--nodes", None, reason, "Give --nodes or --ranks-per-node, or `--set cluster=h100:16` and the like.")


def _on_gpus(spec: RunSpec, cluster: ClusterSpec | None) -> bool:
    named = cluster is not None and not cluster.accelerator.is_processor
    return spec.train.device == "cuda" or (spec.train.device == "auto" and named)


def _advice_on_pods(launch: Launch) -> list[Problem]:
    if launch.volume and launch.run_dir.startswith("/shared/"):
        return []
    way_out = "Give --volume CLAIM, which is mounted at /shared, and --run-dir /shared/runs/NAME."
    return [
        Problem(
            "advice",
            "--run-dir",
            launch.run_dir,
            "the run folder is inside each pod, so the pods do not share it, and it is lost when they end",
            way_out,
        )
    ]
