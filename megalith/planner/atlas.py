"""The best layout of several models on several numbers of nodes. Imports torch only to trace parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith.planner.candidates import Space
from megalith.planner.plan_result import CONVENTION, assumption, headroom, short
from megalith.planner.request import PlanRequest, ResolvedRequest, resolve
from megalith.planner.search import Candidate, search
from megalith.spec.cluster import ClusterSpec
from megalith.spec.problem import Problem, SpecErrors

MODELS = ("llama3.2-1b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "dense-2t")
"""Default models of a map."""

SPACE = Space(microbatches=(1, 2, 4), most_chunks=4, again=(), offload=())
"""A small search space, because each square of the map needs its own search."""

MAXIMUM = 7
"""Largest number of columns, each a number of nodes."""


@dataclass(frozen=True)
class Square:
    """The best layout of one model on one number of nodes. `choice` is None if nothing fits, or if no layout divides the batch evenly;
    `why` states the reason."""

    model: str
    nodes: int
    devices: int
    choice: Candidate | None
    why: str

    def to_json(self) -> dict[str, Any]:
        named = {"model": self.model, "nodes": self.nodes, "devices": self.devices, "why": self.why, "layout": None}
        return named if self.choice is None else named | {"layout": short(self.choice.plan)} | self.choice.to_json()


@dataclass(frozen=True)
class Atlas:
    """All squares of a map, and their common settings."""

    request: ResolvedRequest
    models: tuple[str, ...]
    nodes: tuple[int, ...]
    squares: tuple[Square, ...]

    def to_json(self) -> dict[str, Any]:
        cluster, train = self.request.cluster, self.request.run.train
        return {
            "accelerator": cluster.accelerator.name, "title": cluster.accelerator.title, "per_node": cluster.per_node,
            "memory": cluster.accelerator.memory, "peak": cluster.accelerator.wide, "seq_len": train.seq_len,
            "global_batch": train.global_batch, "format": self.request.format, "convention": CONVENTION,
            "assumption": assumption(self.request.software),
            "spare": headroom(), "models": self.models, "nodes": self.nodes,
            "notes": list(self.request.notes), "squares": [square.to_json() for square in self.squares],
        }  # fmt: skip


def atlas(plan_request: PlanRequest, models: Sequence[str], *, tick: Callable[[str], None] = lambda name: None) -> Atlas:
    """Search for every square; `tick` gets each square's name before its search. The request's cluster is the largest cluster that is
    searched. Raises SpecErrors with all problems of the request."""
    request = _all(plan_request, models)
    cluster = request[0].cluster
    nodes = columns(cluster.nodes)
    squares: list[Square] = []
    for model, one in zip(models, request, strict=True):
        for count in nodes:
            tick(f"{model} on {count} nodes")
            squares.append(_square(model, replace(one, cluster=_part(cluster, count)), count))
    return Atlas(request[0], tuple(models), nodes, tuple(squares))


def columns(nodes: int) -> tuple[int, ...]:
    """Return at most MAXIMUM numbers of nodes, from 1 to all nodes; each is the previous number times the same power of two, except the
    last."""
    found = [1 << bit for bit in range(nodes.bit_length())]
    step = -(-len(found) // (MAXIMUM - 1))
    return tuple(dict.fromkeys((*found[::step], nodes)))


def _all(plan_request: PlanRequest, models: Sequence[str]) -> list[ResolvedRequest]:
    found: list[ResolvedRequest] = []
    problems: list[Problem] = []
    for model in models:
        try:
            found.append(resolve(replace(plan_request, model=model)))
        except SpecErrors as errors:
            problems += [one for one in errors.problems if one not in problems]
    if problems:
        raise SpecErrors(problems)
    return found


def _part(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    return cluster.model_copy(update={"count": min(cluster.count, nodes * cluster.per_node)})


def _square(model: str, request: ResolvedRequest, nodes: int) -> Square:
    train, cluster = request.run.train, request.cluster
    format, narrow = request.computes
    found = search(
        request.model, cluster, seq_len=train.seq_len, global_batch=train.global_batch, format=format, narrow=narrow,
        software=request.software, top=1, space=SPACE, valid=request.is_valid,
    )  # fmt: skip
    if found.best is not None:
        return Square(model, nodes, cluster.count, found.best, "")
    if found.closest is None:
        why = "every plan that fits is refused" if found.looked_at else "no layout divides the batch"
        return Square(model, nodes, cluster.count, None, why)
    need = found.closest.estimate.memory.total / 2**30
    return Square(model, nodes, cluster.count, None, f"{need:,.0f} GiB needed")
