import pytest

from megalith.fleet.environment import FIRST_PORT, PORTS, Place, expand_nodes, expand_tasks, find

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}
LOCAL = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MEGALITH_STORE": "file:///runs/a b/ranks/store-1f",
    "MEGALITH_GENERATION": "1f",
}


def test_nobodys_environment_is_no_place():
    assert find({"PATH": "/bin"}) is None


def test_our_own_ranks_find_their_file_store():
    assert find(LOCAL) == Place(1, 4, 1, 4, "local", "file:///runs/a b/ranks/store-1f", "1f")


def test_torchrun_ranks_are_clients_of_the_agents_store():
    assert find(TORCHRUN) == Place(5, 8, 1, 4, "torchrun", "tcp://10.0.0.1:29500", None, serves=False, engine_serves=True)


def test_the_count_of_starts_that_torchruns_agents_keep_apart_means_nothing():
    assert find(TORCHRUN) == find(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"})


def test_rank_0_serves_when_the_agent_does_not():
    mine = find(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False", "RANK": "0", "LOCAL_RANK": "0"})
    assert mine is not None
    assert mine.serves


def test_slurm_tasks_meet_on_the_first_machine_of_their_step():
    port = FIRST_PORT + (4711 * 31 + 3) % PORTS
    assert find(SLURM) == Place(6, 7, 2, 3, "slurm", f"tcp://node07:{port}", "4711.3.0")


def test_slurms_batch_script_and_single_task_steps_may_start_ranks_of_their_own():
    assert find({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) is None
    assert find(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_port_and_host_given_by_the_user_win():
    place = find(SLURM | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234"})
    assert place is not None
    assert place.store == "tcp://[fe80::1]:1234"


def test_torchrun_inside_of_slurm_is_torchrun():
    place = find(SLURM | TORCHRUN)
    assert place is not None
    assert place.kind == "torchrun"


def test_plain_variables_are_enough():
    place = find({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "worker-0", "MASTER_PORT": "23456"})
    assert place == Place(2, 3, 0, 1, "variables", "tcp://worker-0:23456", "0")
    assert find({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_half_an_environment_is_an_error_that_names_all_that_is_missing():
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, MASTER_PORT is not set"):
        find({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="WORLD_SIZE=many is not a number"):
        find(TORCHRUN | {"WORLD_SIZE": "many"})
    with pytest.raises(ValueError, match="neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST"):
        find({name: value for name, value in SLURM.items() if "NODELIST" not in name})


def test_a_rank_outside_its_world_is_an_error():
    with pytest.raises(ValueError, match="rank 8 does not exist in a run of 8 ranks"):
        find(TORCHRUN | {"RANK": "8"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n1", ["n1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1]-b,c-d[3-4].lan", ["a1-b", "c-d3.lan", "c-d4.lan"]),
    ],
)
def test_node_lists_expand_as_slurm_writes_them(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "n[1-3", "n]1[", "n[3-1]", "n[a-b]", "n[]", "a,,b", "n[1-]"])
def test_a_malformed_node_list_is_refused(text):
    with pytest.raises(ValueError, match=r"in Slurm's form|not a range of machines"):
        expand_nodes(text)


def test_tasks_of_each_machine_expand():
    assert expand_tasks("4(x2),3") == [4, 4, 3]
    with pytest.raises(ValueError, match="not a number of tasks"):
        expand_tasks("4(y2)")


def test_an_agents_world_of_one_is_a_place():
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    assert find(variables, alone=True) == Place(0, 1, 0, 1, "variables", "tcp://127.0.0.1:23456", "0", serves=True)
    step = SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    place = find(step | {"SLURM_STEP_NODELIST": "node07", "SLURM_STEP_TASKS_PER_NODE": "1"}, alone=True)
    assert place is not None and place.rank == 0 and place.world == 1 and place.serves
    assert find({}, alone=True) is None
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, MASTER_PORT is not set"):
        find({"RANK": "0", "WORLD_SIZE": "1"}, alone=True)
