"""Slurm: a batch script that saves before its time is up, and queues itself again as long as that makes sense."""

import shlex

from megalith.fleet.engines.launch import HOPELESS, RETRYABLE, Artefact, Launch, exports, label, torchrun
from megalith.spec.run import RunSpec

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --exclusive
{lasting}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=B:USR1@{grace}
# One task a node: torchrun, which starts the ranks. {grace} s before the end this script is told, and lets the ranks save and stop.
# When a node fails Slurm queues the job again by itself (--requeue); the run goes on from its newest intact state.
set -u
{change_folder}{exports}
run_dir={run_dir}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
endpoint="$head:$(({port} + SLURM_JOB_ID % 1000))"

stopping=0
stop() {{
  stopping=1
  scancel --signal=TERM "$SLURM_JOB_ID.0"   # the first step: every rank saves and stops at the end of its step
}}
trap stop USR1 TERM

srun {ends} bash -c {command} -- "$endpoint" &
step=$!
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do   # a signal ends `wait` before the step has ended
  wait "$step"
  status=$?
done

# Would the same command get further? torchrun's own status does not tell; then the run's log does.
again=0
case $status in
  0|{hopeless}) ;;
  {retryable}) again=1 ;;
  *) tail -n 1 "$run_dir/events.jsonl" 2>/dev/null | grep -q '"type":"run_finished".*"reason":"failed"' || again=1 ;;
esac
if [ "$stopping" = 1 ] && [ "$status" != 0 ]; then again=1; fi
if tail -n 1 "$run_dir/events.jsonl" 2>/dev/null | grep -q '"type":"run_finished".*"reason":"stopped"'; then again=1; fi
if [ "$again" = 1 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def emit(spec: RunSpec, launch: Launch) -> Artefact:
    """`sbatch FILE` starts it."""
    options = {
        "gpus-per-node": launch.gpus_per_node or None,
        "cpus-per-task": launch.cpus_per_node or None,
        "partition": launch.partition,
        "account": launch.account,
        "time": _time(launch.hours),
    }
    name = label(spec.name)
    text = TEMPLATE.format(
        name=name,
        nodes=launch.nodes(spec) + launch.spares,
        resources="".join(f"#SBATCH --{option}={value}\n" for option, value in options.items() if value is not None),
        lasting="#SBATCH --no-kill\n" if launch.spares else "",  # the job outlives a node: a spare takes its place
        ends="--no-kill --kill-on-bad-exit=0" if launch.spares else "--kill-on-bad-exit=1",
        grace=launch.grace,
        change_folder=f"cd {shlex.quote(launch.workdir)} || exit 2\n" if launch.workdir else "",
        exports=exports(launch),
        run_dir=shlex.quote(launch.run_dir),
        port=launch.port,
        command=shlex.quote("exec " + torchrun(spec, launch, endpoint='"$1"')),
        hopeless="|".join(str(code) for code in HOPELESS if code != 1),
        retryable="|".join(map(str, RETRYABLE)),
        restarts=launch.restarts,
    )
    return Artefact(f"{name}.sbatch", text, f"sbatch {name}.sbatch")


def _time(hours: float | None) -> str | None:
    """Slurm's D-HH:MM:SS."""
    if hours is None:
        return None
    seconds = round(hours * 3600)
    return f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
