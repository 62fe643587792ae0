"""Shell scripts for this machine, or for a few machines on which a person starts the script."""

import shlex

from megalith.fleet.engines.launch import Artefact, Launch, before, exports, label, torchrun, training
from megalith.spec.run import RunSpec

LOCAL = """\
#!/bin/bash
# All ranks on this machine: megalith starts, watches and replaces them itself.
set -eu
{change_folder}{exports}
exec python -m {command}
"""

TORCHRUN = """\
#!/bin/bash
# Run this on each of the {nodes} nodes; the first argument is a host that all can reach, one of them.
set -eu
{change_folder}{exports}
{before}head=${{1:?"name the host at which the nodes meet"}}
exec {command}
"""


def emit_local(spec: RunSpec, launch: Launch) -> Artefact:
    """Return a script that starts all ranks on this machine; the command is `bash FILE`."""
    alone = Launch(run_file=launch.run_file, run_dir=launch.run_dir, ranks_per_node=spec.ranks, overrides=launch.overrides)
    name = label(spec.name)
    text = LOCAL.format(
        change_folder=_change(launch),
        exports="\n".join(f"export {key}={shlex.quote(value)}" for key, value in launch.environment.items()) or "# no variables",
        command=shlex.join(training(alone)),
    )
    return Artefact(f"{name}.sh", text, f"bash {name}.sh")


def emit_torchrun(spec: RunSpec, launch: Launch) -> Artefact:
    """Return a script that a person starts on every node with `bash FILE HOST`."""
    name = label(spec.name)
    text = TORCHRUN.format(
        nodes=launch.nodes(spec) + launch.spares,
        change_folder=_change(launch),
        exports=exports(launch),
        before=f"{before(launch)}\n" if launch.agent else "",
        command=torchrun(spec, launch, endpoint=f'"$head:{launch.port}"'),
    )
    return Artefact(f"{name}-node.sh", text, f"bash {name}-node.sh HOST")


def _change(launch: Launch) -> str:
    return f"cd {shlex.quote(launch.workdir)}\n" if launch.workdir else ""
