"""`megalith init`: a run file with the keys that matter."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalith.commands.plan import number, whole
from megalith.commands.shared.arguments import Json, Overwrite
from megalith.commands.shared.output import print_json, write

if TYPE_CHECKING:
    from megalith.spec.families import Model
    from megalith.spec.run import RunSpec

KEYS = (
    "name", "cluster",
    "model.preset",
    "data.path",
    "plan.data", "plan.tensor", "plan.pipeline", "plan.context", "plan.expert", "plan.zero", "plan.microbatch", "plan.recompute",
    "train.steps", "train.global_batch", "train.seq_len", "train.precision",
    "optimizer.lr", "optimizer.schedule", "optimizer.warmup",
    "validation.every", "checkpoint.every",
)  # fmt: skip
"""The keys of a run file that `init` writes, in their order. `init` also writes other values that differ from their defaults."""

FURTHER_LR = 2e-5
"""Learning rate of a run that starts from trained weights."""

LOCAL_LENGTH, LOCAL_BATCH, LOCAL_STEPS = 512, 32, 1000
"""Defaults of a run on this machine: maximum sequence length, sequences a step, and steps."""


@dataclass(frozen=True)
class InitRequest:
    """The requested values of a new run. None stands for a default that suits the cluster, or this machine if no cluster is given."""

    model: str
    data: str = "data/tokens"
    cluster: str | None = None
    steps: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None


def command(
    out: Annotated[Path, typer.Argument(metavar="[RUN.toml]", help="The file to write.")] = Path("run.toml"),
    model: Annotated[str | None, typer.Option(help="A model by name, such as llama3.1-8b; `megalith models` lists them.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FOLDER", help="Prepared data. Default: data/tokens.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="NAME:DEVICES, such as h100:8, or a cluster file (.toml). Default: this machine.")
    ] = None,
    steps: Annotated[int | None, typer.Option(parser=number, metavar="STEPS", help="Steps of the whole run.")] = None,
    global_batch: Annotated[int | None, typer.Option(parser=whole, metavar="SEQUENCES", help="Sequences a step.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(parser=whole, metavar="TOKENS", help="Tokens of a sequence; 8k is 8 x 1024.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a run file with the keys that matter and their meaning. On a terminal without --model, ask for the model, cluster and data.

    With --cluster, use the best layout that `megalith plan` predicts. Without --cluster, the run is for this machine.

    Example:  megalith init mine.toml --model llama3.1-8b --cluster h100:8 --data data/tokens
    """
    ask = sys.stdin.isatty() and not as_json
    if model is None:
        if not ask:
            raise typer.BadParameter("--model is needed. `megalith models` lists the models that have a name.")
        model = typer.prompt("Model (`megalith models` lists them)", default="tiny")
        cluster = cluster or typer.prompt("Cluster, such as h100:8 (empty: this machine)", default="", show_default=False) or None
        data = data or typer.prompt("Folder of prepared data", default=InitRequest.data)
    assert model is not None
    spec = init(InitRequest(model, data or InitRequest.data, cluster, steps, global_batch, seq_len))
    write(text(spec), out, overwrite=overwrite)
    if as_json:
        print_json({"ok": True, "out": str(out), "spec": spec.model_dump(mode="json")})
        return
    print(f"written: {out}\nnext: megalith check {out}")


def init(wish: InitRequest) -> "RunSpec":
    """Return the requested run: with the planner's best layout on its cluster, or with a plan for this machine. Raises SpecErrors with all
    problems."""
    from megalith.planner.request import named_model
    from megalith.spec.run import RunSpec

    values = _for_cluster(wish) if wish.cluster else _for_this_machine(wish, named_model(wish.model))
    return RunSpec.model_validate({"name": values["model"]["name"], "data": {"path": wish.data}, **values})


def starting_from(checkpoint: Path, model: "Model") -> "RunSpec":
    """Return a run on this machine that starts from the weights of a checkpoint of `model`."""
    from megalith.spec.run import RunSpec

    values = _for_this_machine(InitRequest(model.name), model)
    values["train"] |= {"init_from": str(checkpoint)}
    values["optimizer"] |= {"lr": FURTHER_LR}
    return RunSpec.model_validate({"name": model.name, "data": {"path": InitRequest.data}, **values})


def _for_cluster(wish: InitRequest) -> dict[str, Any]:
    from megalith.planner import plan_result, request  # the planner takes long to import

    plan_request = request.resolve(
        request.PlanRequest(
            model=wish.model, cluster=wish.cluster, seq_len=wish.seq_len, global_batch=wish.global_batch, offload=False, out=True
        )
    )
    best = plan_result.best_plans(plan_request, top=1).found.best
    assert best is not None, "best_plans raises SpecErrors without a plan"
    run = plan_request.run
    steps = wish.steps or run.train.steps
    return {
        "cluster": run.cluster,
        "model": run.model.model_dump(),
        "plan": best.plan.model_dump(),
        "train": run.train.model_dump() | {"steps": steps},
        "validation": {"every": max(1, steps // 20)},
        "checkpoint": {"every": max(1, steps // 20)},
    }


def _for_this_machine(wish: InitRequest, model: "Model") -> dict[str, Any]:
    """Return the values of a run on this machine: a rank for each GPU if these ranks can divide the batch evenly, else one rank."""
    from megalith.machine import capacity
    from megalith.machine.describe import describe
    from megalith.spec.sizes import count_model

    machine = describe()
    gpus = capacity.find_gpus()[0] or 0
    batch, steps = wish.global_batch or LOCAL_BATCH, wish.steps or LOCAL_STEPS
    data = gpus if gpus and batch % gpus == 0 else 1
    bf16 = any(one.bf16 for one in machine.gpus) if gpus else bool(machine.processor_bf16)
    small = count_model(model.build()).total < 100e6
    return {
        "model": model.model_dump(),
        "plan": {"data": data},
        "train": {
            "steps": steps,
            "global_batch": batch,
            "seq_len": wish.seq_len or min(model.context, LOCAL_LENGTH),
            "precision": "bf16" if bf16 else "fp32",
        },
        "optimizer": {"lr": 1e-3 if small else 3e-4},
        "validation": {"every": max(1, steps // 20)},
        "checkpoint": {"every": max(1, steps // 20)},
    }


def text(spec: "RunSpec", *, by: str = "megalith init") -> str:
    """Return the text of a run file: the keys that matter, with their meaning, and every value that is not its default."""
    from megalith.spec.files import telling
    from megalith.spec.toml import dotted

    found: dict[str, Any] = {dotted(leaf.path): leaf.value for leaf in telling(spec)}
    listed = {
        name: found.pop(name) if name in found else _value(spec, name) for name in KEYS if name != "model.preset" or name in found
    }
    order = {table: [name for name in [*listed, *found] if name.partition(".")[0] == table] for table in type(spec).model_fields}
    lines = [f"# A run of {spec.model.name}, written by `{by}`. `megalith check --show` prints every key."]
    lines += _rows(spec, {name: listed[name] for name in listed if "." not in name})
    for table, names in order.items():
        if rows := {name: (listed | found)[name] for name in names if "." in name}:
            lines += ["", f"[{table}]", *_rows(spec, rows)]
    return "\n".join(lines) + "\n"


def _rows(spec: "RunSpec", values: dict[str, Any]) -> list[str]:
    """Return lines `key = value # meaning` of one table, with the meanings aligned."""
    from megalith.spec.toml import literal

    rows = [(f"{name.partition('.')[2] or name} = {literal(value)}", _meaning(spec, name)) for name, value in values.items()]
    width = min(32, max(len(row) for row, _ in rows))
    return [f"{row:<{width}}  # {meaning}" if meaning else row for row, meaning in rows]


def _value(spec: Any, name: str) -> Any:
    for part in name.split("."):
        spec = getattr(spec, part)
    return spec


def _meaning(spec: "RunSpec", name: str) -> str:
    """Return a key's description; "" if it has none."""
    table, _, last = name.partition(".")
    if name == "model.preset":
        return "`megalith models` lists others"
    fields = type(spec).model_fields if not last else type(getattr(spec, table)).model_fields
    field = fields.get(last or table)
    return (field.description or "") if field else ""
