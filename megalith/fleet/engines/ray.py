"""Ray: a driver that runs one task on each node, and restarts all tasks when one fails."""

import json

from megalith.fleet.engines.launch import RETRYABLE, Artefact, Launch, before, label, torchrun, variables
from megalith.spec.run import RunSpec

TEMPLATE = '''\
"""Started by `{submit}`. One task a node runs torchrun; when one ends wrongly, all are started again."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, RESTARTS, PORT = {nodes}, {restarts}, {port}
RETRYABLE = {retryable}
RESOURCES = {resources}
ENVIRONMENT = {environment}
COMMAND = {command}
RUN_DIR = {run_dir}


@ray.remote(max_retries=0)
def host():
    return socket.gethostname()


@ray.remote(max_retries=0)
def node(head):
    """One node's part of the run; its exit status."""
    command = ["/bin/bash", "-c", COMMAND, "--", f"{{head}}:{{PORT}}"]
    process = subprocess.Popen(command, cwd={workdir}, env=os.environ | ENVIRONMENT, process_group=0)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)


def attempt(group):
    """Start every node's task; the first bad status, 0 if all are good, 71 if a node was lost."""
    def at(number):
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)

    head = ray.get(host.options(num_cpus=0, scheduling_strategy=at(0)).remote())
    cpus, gpus = RESOURCES.get("CPU", 1), RESOURCES.get("GPU", 0)
    waiting = [node.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=at(i)).remote(head) for i in range(NODES)]
    everything = list(waiting)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            status = ray.get(done[0])
        except ray.exceptions.RayError as error:
            print(f"a node was lost: {{error}}", file=sys.stderr)
            status = 71
        if status:
            for task in everything:
                ray.cancel(task, force=True)
            return status
    return 0


def log():
    """The run's log, of the newest epoch."""
    epochs = [int(found[1]) for name in os.listdir(RUN_DIR) if (found := re.fullmatch(r"events-(\\d+)\\.jsonl", name))]
    return os.path.join(RUN_DIR, f"events-{{max(epochs)}}.jsonl" if epochs else "events.jsonl")


def hopeless():
    """Whether the run itself said that it failed: the same command would fail again."""
    try:
        with open(log(), encoding="utf-8") as lines:
            last = lines.readlines()[-1]
    except (OSError, IndexError):
        return False
    return '"type":"run_finished"' in last and '"reason":"failed"' in last


def main():
    ray.init()
    for number in range(RESTARTS + 1):
        group = placement_group([RESOURCES or {{"CPU": 1}}] * NODES, strategy="STRICT_SPREAD")
        ray.get(group.ready())
        status = attempt(group)
        remove_placement_group(group)
        if status == 0 or (status not in RETRYABLE and hopeless()):
            sys.exit(status)
        print(f"start {{number + 1}} ended with status {{status}}", file=sys.stderr)
        time.sleep(min(5 * 2**number, 300))
    sys.exit(status)


if __name__ == "__main__":
    main()
'''


def emit(spec: RunSpec, launch: Launch) -> Artefact:
    """Return a driver that `ray job submit ... -- python FILE` starts."""
    name = label(spec.name)
    submit = f"ray job submit --working-dir . -- python {name}_ray.py"
    resources = {key: value for key, value in {"CPU": launch.cpus_per_node, "GPU": launch.gpus_per_node}.items() if value}
    text = TEMPLATE.format(
        submit=submit,
        nodes=launch.nodes(spec) + launch.spares,
        restarts=launch.restarts,
        port=launch.port,
        retryable=RETRYABLE,
        resources=json.dumps(resources),
        environment=json.dumps(variables(launch), indent=4),
        command=json.dumps((f"{before(launch)} && " if launch.agent else "") + "exec " + torchrun(spec, launch, endpoint='"$1"')),
        workdir=json.dumps(launch.workdir) if launch.workdir else "None",
        run_dir=json.dumps(launch.run_dir),
    )
    return Artefact(f"{name}_ray.py", text, submit)
