"""Slurm: a batch script that makes the run save before the job's time limit, and requeues the job if another start can make
progress."""

import shlex

from megalith.fleet.engines.launch import HOPELESS, Artefact, Launch, before, exports, label, torchrun, training
from megalith.fleet.exit_codes import ExitCode
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
# One task a node: {task}, which starts the ranks. {grace} s before the end this script is told, and lets the ranks save and stop.
# When a node fails Slurm queues the job again by itself (--requeue); the run resumes from its newest intact state.
set -u
{change_folder}{exports}
{before}run={run_dir}
newest() {{ ls -v "$run"/events-*.jsonl 2>/dev/null | tail -n 1 | grep . || echo "$run/events.jsonl"; }}   # the log of the newest epoch
before=$(tail -n 1 "$(newest)" 2>/dev/null)   # of an earlier start
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
endpoint="$head:$(({port} + SLURM_JOB_ID % 1000))"

# Told of the end, it tells the first step: every rank saves and stops at the end of its step.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1 TERM

srun {ends} bash -c {command} -- "$endpoint" &
step=$!
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do   # a signal ends `wait` before the step has ended
  wait "$step"
  status=$?
done

# What the run itself said of its end goes before what the step's status makes of it: torchrun ends with 1 whatever its ranks ended with,
# and a step that lost a node that a spare replaced ends badly although the run did not.
said=$(tail -n 1 "$(newest)" 2>/dev/null)
if [ "$said" = "$before" ]; then said=; fi
case $said in
  *'"type":"run_finished"'*'"reason":"finished"'*) status=0 ;;
  *'"type":"run_finished"'*'"reason":"stopped"'*) status={stopped} ;;
  *'"type":"run_finished"'*'"reason":"failed"'*) status={failed} ;;
  *) if [ "$status" = {failed} ]; then status={lost}; fi ;;   # lost, or dead without a word
esac

again=no
case $status in
  0|{hopeless}) ;;
  *) if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then again=yes; fi ;;
esac
echo "$(date -Is) the run ended with status $status; queued again: $again"
if [ $again = yes ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def emit(spec: RunSpec, launch: Launch) -> Artefact:
    """Return a batch script, which `sbatch FILE` submits."""
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
        before=f"{before(launch)} || exit {int(ExitCode.FAILED)}\n" if launch.agent else "",
        run_dir=shlex.quote(launch.run_dir),
        port=launch.port,
        task="an agent" if launch.agent else "torchrun",
        command=shlex.quote(_task(spec, launch)),
        hopeless="|".join(map(str, HOPELESS)),
        stopped=int(ExitCode.STOPPED),
        failed=int(ExitCode.FAILED),
        lost=int(ExitCode.LOST),
        restarts=launch.restarts,
    )
    return Artefact(f"{name}.sbatch", text, f"sbatch {name}.sbatch")


def _task(spec: RunSpec, launch: Launch) -> str:
    """Return the shell script of the task on each node; the script's first argument is the rendezvous address. Slurm starts
    agents without torchrun, which would restart all agents when a lost node returns, would wait for a node that does not return,
    and would hide the agents' exit status.
    """
    if launch.agent:
        return f"export MASTER_ADDR=${{1%:*}} MASTER_PORT=${{1##*:}}; exec python -m {shlex.join(training(launch))}"
    return "exec " + torchrun(spec, launch, endpoint='"$1"')


def _time(hours: float | None) -> str | None:
    """Return a time limit in Slurm's form D-HH:MM:SS; None for no limit."""
    if hours is None:
        return None
    seconds = round(hours * 3600)
    return f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
