"""Files for engines: they equal golden texts and parse, and scripts behave correctly with stand-ins for the engine's programs."""

import ast
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.fleet.engines import ENGINES, Launch, emit
from megalith.fleet.engines.launch import label
from megalith.fleet.exit_codes import MEANINGS, ExitCode
from megalith.spec.run import RunSpec
from tests.patience import PATIENCE
from tests.specs import tiny_run

GOLDEN = Path(__file__).parent / "golden"
LAUNCH = Launch(
    run_file="/shared/run.toml",
    run_dir="/shared/runs/it's mine",
    ranks_per_node=4,
    gpus_per_node=4,
    cpus_per_node=32,
    hours=36.5,
    workdir="/shared/code",
    partition="gpu",
    image="registry/megalith:1",
    volume="shared-claim",
    environment={"NCCL_DEBUG": "WARN", "WORDS": 'two words and a "quote"'},
    overrides=("train.steps=10", "name=other run"),
)


def _spec() -> RunSpec:
    return tiny_run(plan={"data": 4, "tensor": 2}).model_copy(update={"name": "Llama 8B, first try"})


@pytest.mark.parametrize("engine", ENGINES)
def test_artefacts_are_as_in_the_golden_files(engine: str) -> None:
    """A changed template shows as a difference. To accept it, overwrite the golden file with the new text."""
    made = emit(engine, _spec(), LAUNCH)
    golden = GOLDEN / f"{engine}.txt"
    assert f"# {made.submit}\n{made.text}" == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("engine", ["local", "torchrun", "slurm"])
def test_scripts_are_bash(engine: str, tmp_path: Path) -> None:
    made = emit(engine, _spec(), LAUNCH)
    path = tmp_path / made.file
    path.write_text(made.text)
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_ray_job_is_python() -> None:
    ast.parse(emit("ray", _spec(), LAUNCH).text)


@pytest.mark.parametrize(
    "launch",
    [LAUNCH, Launch(run_file="r.toml", run_dir="runs/x", ranks_per_node=2), replace(LAUNCH, namespace="team", agent=True)],
)
def test_the_manifest_is_yaml_that_says_what_was_asked(launch: Launch) -> None:
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load(emit("k8s", _spec(), launch).text)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert manifest["kind"] == "JobSet"
    assert job["completions"] == job["parallelism"] == launch.nodes(_spec())
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == launch.grace
    assert {entry["name"]: entry["value"] for entry in container["env"]}.items() >= dict(launch.environment).items()
    assert launch.run_file in container["args"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4 if launch.gpus_per_node else "resources" not in container


def _bin(folder: Path, **scripts: str) -> None:
    """Put stand-ins for programs first in the PATH."""
    folder.mkdir()
    for name, body in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)


def _play_slurm(
    tmp_path: Path, *, srun: str, before: str = "", events: str = "", restarts: int = 0, launch: Launch = LAUNCH
) -> tuple[int, str, str]:
    """Run the batch script with stand-ins for Slurm's programs. Return the status, the orders to Slurm, and srun's arguments.

    `before`: events of earlier starts in the run's log; `events`: those that this start writes.
    """
    run_dir = tmp_path / "run's folder"
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_text(before)
    (tmp_path / "events").write_text(events)
    orders, given = tmp_path / "orders", tmp_path / "given"
    note = f'echo "$(basename "$0") $*" >> {orders}'
    _bin(
        tmp_path / "bin",
        scontrol=f'if [ "$1" = show ]; then echo node7; echo node8; else {note}; fi',
        python=f'echo "$@" > {tmp_path}/before-the-step',
        scancel=f"{note}; kill -TERM $(cat {tmp_path}/pid)",
        srun=f'printf "%s\\n" "$@" > {given}\necho $$ > {tmp_path}/pid\ncat {tmp_path}/events >> "{run_dir}/events.jsonl"\n{srun}',
    )
    made = emit("slurm", _spec(), replace(launch, run_dir=str(run_dir), workdir=None))
    (tmp_path / made.file).write_text(made.text)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "1042", "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip
    done = subprocess.run(["bash", str(tmp_path / made.file)], env=environment, timeout=PATIENCE, check=False)
    return done.returncode, orders.read_text() if orders.exists() else "", given.read_text()


def _finished(reason: str) -> str:
    return f'{{"type":"run_finished","time":1.0,"reason":"{reason}","step":3}}\n'


STEP = '{"type":"step","time":1.0}\n'


@pytest.mark.parametrize("code", MEANINGS)
def test_slurm_queues_again_what_another_start_can_help(code: ExitCode, tmp_path: Path) -> None:
    reason = {ExitCode.FINISHED: "finished", ExitCode.FAILED: "failed", ExitCode.STOPPED: "stopped"}.get(code)
    status, orders, _ = _play_slurm(tmp_path, srun=f"exit {int(code)}", events=_finished(reason) if reason else STEP)
    assert status == code
    assert ("requeue 1042" in orders) == MEANINGS[code].retry


@pytest.mark.parametrize(("reason", "code"), [("finished", 0), ("stopped", 75), ("failed", 1)])
@pytest.mark.parametrize("step", [0, 1, 137])
def test_the_jobs_status_is_what_the_run_says_of_its_end(step: int, reason: str, code: int, tmp_path: Path) -> None:
    """torchrun always ends with 1, and a job step that lost a node ends with an error although a spare replaced it."""
    assert _play_slurm(tmp_path, srun=f"exit {step}", events=_finished(reason))[0] == code


@pytest.mark.parametrize(("step", "code"), [(1, 71), (71, 71), (137, 137)])
def test_slurm_queues_again_a_run_that_lost_a_rank(step: int, code: int, tmp_path: Path) -> None:
    status, orders, _ = _play_slurm(tmp_path, srun=f"exit {step}", events=_finished("lost"))
    assert status == code and "requeue" in orders


@pytest.mark.parametrize("before", ["", STEP, _finished("failed"), _finished("stopped")])
def test_slurm_queues_again_a_run_that_died_without_a_word(before: str, tmp_path: Path) -> None:
    status, orders, _ = _play_slurm(tmp_path, srun="exit 1", before=before)
    assert status == ExitCode.LOST and "requeue" in orders


def test_slurm_reads_what_the_newest_epoch_of_the_run_said(tmp_path: Path) -> None:
    """A later owner of the run folder writes under other names (`megalith.epochs`)."""
    run = f'"{tmp_path}/run\'s folder"'
    newer = f"echo > {run}/events-9.jsonl; cp {tmp_path}/events {run}/events-10.jsonl; echo >> {run}/events.jsonl; exit 1"
    status, orders, _ = _play_slurm(tmp_path, srun=newer, events=_finished("finished"))
    assert status == 0 and "requeue" not in orders


def test_what_an_earlier_start_said_does_not_make_a_wrong_description_worth_a_retry(tmp_path: Path) -> None:
    status, orders, _ = _play_slurm(tmp_path, srun="exit 2", before=_finished("stopped"))
    assert status == ExitCode.BAD_SPECIFICATION and "requeue" not in orders


def test_slurm_does_not_queue_for_ever(tmp_path: Path) -> None:
    assert "requeue" not in _play_slurm(tmp_path, srun="exit 71", restarts=LAUNCH.restarts)[1]


def test_slurm_passes_the_signal_on_waits_for_the_save_and_queues_again(tmp_path: Path) -> None:
    told = "trap 'sleep 0.3; echo saved > saved; exit 1' TERM; kill -USR1 $PPID; for i in $(seq 100); do sleep 0.1; done"
    status, orders, _ = _play_slurm(tmp_path, srun=f"cd {tmp_path}; {told}")
    assert (tmp_path / "saved").exists()
    assert status == ExitCode.LOST, "stopped before there was anything to say"
    assert orders.splitlines() == ["scancel --signal=TERM 1042.0", "scontrol requeue 1042"]


def test_one_task_a_node_gets_the_whole_command(tmp_path: Path) -> None:
    given = _play_slurm(tmp_path, srun="exit 0")[2].splitlines()
    assert given[-1] == f"node7:{29_500 + 42}"
    command = given[given.index("-c") + 1]
    assert command.startswith("exec torchrun --nnodes 2 --nproc-per-node 4")
    assert "--set 'name=other run'" in command


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_quotes_and_spaces_arrive_as_they_are(tmp_path: Path) -> None:
    _bin(tmp_path / "bin", torchrun='printf "%s\\n" "$@"; printf "%s\\n" "$WORDS"')
    made = emit("torchrun", _spec(), replace(LAUNCH, workdir=None))
    (tmp_path / made.file).write_text(made.text)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(tmp_path / made.file), "host9"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    words = done.stdout.splitlines()
    assert "host9:29500" in words
    assert LAUNCH.run_dir in words
    assert words[-1] == LAUNCH.environment["WORDS"]


def test_an_agent_is_one_process_a_node_and_spares_may_join() -> None:
    text = emit("torchrun", _spec(), replace(LAUNCH, agent=True, spares=1)).text
    assert "--nnodes 2:3 --nproc-per-node 1" in text
    assert "--max-restarts 0 -m megalith.cli agent /shared/run.toml" in text


def test_a_slurm_job_with_spares_outlives_a_node() -> None:
    text = emit("slurm", _spec(), replace(LAUNCH, agent=True, spares=1)).text
    assert "#SBATCH --no-kill\n" in text and "srun --no-kill --kill-on-bad-exit=0 bash" in text and "#SBATCH --nodes=3\n" in text
    assert "--no-kill" not in emit("slurm", _spec(), LAUNCH).text


def test_slurm_starts_agents_itself_and_says_where_they_meet(tmp_path: Path) -> None:
    launch, shown = replace(LAUNCH, agent=True), 'echo "$MASTER_ADDR $MASTER_PORT $*" >> given-to-python'
    _bin(tmp_path / "programs", python=shown)
    srun = f'cd {tmp_path}; export PATH={tmp_path}/programs:$PATH; exec "${{@:2}}"'
    assert _play_slurm(tmp_path, srun=srun, launch=launch)[0] == 0
    words = (tmp_path / "given-to-python").read_text()
    assert words.startswith("node7 29542 -m megalith.cli agent /shared/run.toml --run-dir ")
    assert words.endswith("--set train.steps=10 --set name=other run\n")
    assert (tmp_path / "before-the-step").read_text().startswith("-m megalith.cli key ")


def test_everything_wrong_is_said_at_once() -> None:
    launch = replace(LAUNCH, ranks_per_node=3, gpus_per_node=2, spares=1, grace=-1, environment={"A B": "c", "MEGALITH_KEY": "k"})
    with pytest.raises(ValueError) as error:
        emit("slurm", _spec(), launch)
    for words in ("does not divide", "cannot use spare nodes", "fewer than", "grace = -1", "'A B'", "readable by everyone"):
        assert words in str(error.value)


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="local, torchrun, slurm, k8s, ray"):
        emit("lsf", _spec(), LAUNCH)


@pytest.mark.parametrize(("name", "expected"), [("Llama 8B!", "llama-8b"), ("--", "run"), ("x" * 60, "x" * 40)])
def test_names_become_what_schedulers_take(name: str, expected: str) -> None:
    assert label(name) == expected


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "local"])
def test_machines_with_agents_are_given_a_key_and_others_none(engine: str) -> None:
    """The key is in a file of the run folder, and in no argument or variable."""
    made = "python -m megalith.cli key '/shared/runs/it'\"'\"'s mine'"
    text = emit(engine, _spec(), replace(LAUNCH, agent=True)).text.replace('\\"', '"')
    assert made in text and text.index(made) < text.index("megalith.cli agent")
    assert "MEGALITH_KEY" not in text
    assert "megalith.cli key" not in emit(engine, _spec(), LAUNCH).text
