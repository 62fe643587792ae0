"""Table of the functions that write each engine's artefact."""

from collections.abc import Callable

from megalith.fleet.engines import kubernetes, local, ray, slurm
from megalith.fleet.engines.launch import Artefact, Launch, problems
from megalith.spec.run import RunSpec

ENGINES: dict[str, Callable[[RunSpec, Launch], Artefact]] = {
    "local": local.emit_local,
    "torchrun": local.emit_torchrun,
    "slurm": slurm.emit,
    "k8s": kubernetes.emit,
    "ray": ray.emit,
}


def emit(engine: str, spec: RunSpec, launch: Launch) -> Artefact:
    """Return the file that an engine needs to start this run. Raises ValueError with every problem."""
    if engine not in ENGINES:
        raise ValueError(f"{engine!r} is not a known engine. Use one of {', '.join(ENGINES)}")
    found = problems(spec, launch)
    if found:
        raise ValueError("this run cannot be launched with these options:\n" + "\n".join(f"- {problem}" for problem in found))
    return ENGINES[engine](spec, launch)
