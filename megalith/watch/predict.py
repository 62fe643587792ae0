"""The planner's prediction for a run, computed in a separate process, because tracing a model needs torch and takes seconds. `python -m
megalith.watch.predict RUN_DIR PHASE` prints the prediction as one JSON object."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith import epochs
from megalith.mesh import Mesh
from megalith.planner.measured import unreadable
from megalith.spec import cluster as clusters
from megalith.spec.base import AbsentError
from megalith.spec.files import SPEC_FILE
from megalith.spec.phases import Phases, during
from megalith.spec.plan import Plan
from megalith.spec.run import RunSpec

LIMIT = 300.0  # seconds that a prediction may take


def predicted(spec: RunSpec) -> dict[str, Any]:
    """Return predictions for a run: the seconds of each term of a step, and under `others` the same for plans that differ in one
    key; for each position in the pipeline, the bytes of its first rank by category; watts and dollars per hour of a device.
    Figures that cannot be predicted are None, and `why` gives the reason."""
    found: dict[str, Any] = {"time": None, "mfu": None, "tokens_per_second": None, "memory": None, "why": ""}
    accelerator = None
    if spec.cluster != "local":
        cluster = clusters.load(spec.cluster)
        accelerator = cluster.accelerator
        found |= {"price_per_hour": cluster.price_per_hour, "watts": accelerator.power, "limit": accelerator.memory}
    if accelerator is None:
        found["why"] = f'cluster = "{spec.cluster}" names no device, so the seconds of a step are not predicted'
    elif not accelerator.peak:
        found["why"] = "the catalogue has no peak FLOP/s for this device, so the seconds of a step are not predicted"
    else:
        _of_time(spec, found)
    _of_memory(spec, found)
    return found


def _of_time(spec: RunSpec, found: dict[str, Any]) -> None:
    from megalith.cost.estimate import estimate  # a prediction, if one can be made
    from megalith.cost.predicted import workload_of
    from megalith.planner.slowdown import alternatives, by_term

    try:
        one = estimate(workload_of(spec))
        found["others"] = alternatives(spec)
    except (ValueError, AssertionError, KeyError, AbsentError) as error:
        found["why"] = f"the seconds of a step are not predicted: {error or type(error).__name__}"
        return
    time, devices = one.time, one.devices
    found |= {"time": {"step": time.step, **by_term(time)}, "mfu": one.mfu, "tokens_per_second": one.tokens_per_second * devices}


def _of_memory(spec: RunSpec, found: dict[str, Any]) -> None:
    from megalith.cost.predicted import predict, workload_of  # as above

    try:
        workload = workload_of(spec)
        mesh = Mesh.of(spec.plan)
        firsts: dict[int, int] = {}
        for rank in range(mesh.ranks):
            firsts.setdefault(mesh.coordinates(rank)["pipeline"], rank)
            if len(firsts) == spec.plan.pipeline:
                break
        found["memory"] = [predict(workload, rank=firsts[place]).memory for place in sorted(firsts)]
    except (ValueError, AssertionError, KeyError, AbsentError) as error:
        found["why"] = "; ".join(filter(None, (found["why"], f"memory is not predicted: {error or type(error).__name__}")))


def ask(run_dir: Path, plan: Plan | None = None, phase: int = 0) -> dict[str, Any]:
    """Return `predicted` for one phase of the run in a folder, computed in a separate process. If that fails, the result has only
    `why`. `plan`: a plan that replaces the run's plan."""
    more = [str(phase), *([] if plan is None else [plan.model_dump_json()])]
    command = [sys.executable, "-m", "megalith.watch.predict", str(run_dir), *more]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT, check=True, stdin=subprocess.DEVNULL)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"why": f"the prediction failed ({type(error).__name__})"}
    return found


def main() -> None:
    """Print the prediction for a run as JSON. The arguments are the run folder, the number of the phase and, optionally, another
    plan as JSON."""
    try:
        spec = RunSpec.model_validate_json(epochs.newest(Path(sys.argv[1]), SPEC_FILE).read_text(encoding="utf-8"))
    except ValidationError as error:
        print(json.dumps({"why": unreadable(error)}))
        return
    phases, number = Phases.of(spec).all, int(sys.argv[2])
    spec = during(spec, phases[min(number, len(phases) - 1)])
    if len(sys.argv) > 3:
        spec = spec.model_copy(update={"plan": Plan.model_validate_json(sys.argv[3])})
    print(json.dumps(predicted(spec)))


if __name__ == "__main__":
    main()
