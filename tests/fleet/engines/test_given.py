"""A launch from few given values."""

from typing import Any

import pytest

from megalith.fleet.engines import ENGINES, emit, given
from megalith.fleet.engines.given import USED_BY
from megalith.spec.problem import SpecErrors
from megalith.spec.run import RunSpec
from tests.specs import tiny_run

NEEDED: dict[str, dict[str, Any]] = {engine: {} for engine in ENGINES} | {"k8s": {"image": "registry/megalith:1"}}


def _run(cluster: str = "h100:16") -> RunSpec:
    return tiny_run(plan={"data": 8, "tensor": 2}).model_copy(update={"cluster": cluster})


def _given(engine: str = "slurm", cluster: str = "h100:16", **options: Any) -> Any:
    return given(_run(cluster), engine, run_file="run.toml", run_dir="runs/a", **(NEEDED[engine] | options))


def _problems(*arguments: str, **options: Any) -> str:
    with pytest.raises(SpecErrors) as caught:
        _given(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_names_its_cluster_needs_nothing_more(engine: str) -> None:
    launch, _ = _given(engine)
    assert launch.nodes(_run()) == (1 if engine == "local" else 2)
    assert launch.gpus_per_node == (8 if engine in ("slurm", "k8s", "ray") else 0)
    assert emit(engine, _run(), launch).text


@pytest.mark.parametrize("options", [{"nodes": 4}, {"ranks_per_node": 4}, {"nodes": 4, "ranks_per_node": 4}], ids=str)
def test_nodes_and_ranks_of_each_follow_from_one_another(options: dict[str, int]) -> None:
    launch, _ = _given("torchrun", "local", **options)
    assert (launch.ranks_per_node, launch.nodes(_run())) == (4, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 3}, "16 ranks cannot be divided evenly among 3 nodes"),
        ({"nodes": 0}, "among 0 nodes"),
        ({"nodes": 2, "ranks_per_node": 4}, "2 nodes with 4 ranks each have 8 ranks, but the plan has 16"),
        ({"ranks_per_node": 5}, "does not divide the plan's 16 ranks"),
        ({"hours": 0.05}, "the time limit of 180 s leaves no time for training, because the run needs the last 300 s"),
        ({"image": "x", "volume": "y"}, "--volume"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], said: str) -> None:
    assert said in _problems(**options)


def test_everything_wrong_is_said_at_once() -> None:
    said = _problems(image="x", partition="gpu", nodes=3, namespace="y")
    assert all(word in said for word in ("--image", "--namespace", "--nodes"))
    assert "--partition" not in said


def test_ranks_of_a_node_are_not_guessed() -> None:
    assert "the run names no cluster" in _problems("slurm", "local")


def test_pods_need_an_image_and_a_shared_run_folder() -> None:
    with pytest.raises(SpecErrors, match="--image"):
        given(_run(), "k8s", run_file="run.toml", run_dir="runs/a")
    assert [one.key for one in _given("k8s")[1]] == ["--run-dir"]
    shared = given(_run(), "k8s", run_file="run.toml", run_dir="/shared/runs/a", image="x", volume="claim")
    assert shared[1] == []


def test_gpus_that_nobody_spoke_of_are_not_asked_for_in_silence() -> None:
    launch, advice = _given("slurm", "local", nodes=2)
    assert launch.gpus_per_node == 0
    assert [one.key for one in advice] == ["--gpus-per-node"]
    assert _given("slurm", "local", nodes=2, gpus_per_node=0)[1] == []


@pytest.mark.parametrize("option", USED_BY)
def test_an_option_changes_what_the_engines_that_use_it_get_and_is_refused_by_others(option: str) -> None:
    numbers = {"nodes": 4, "ranks_per_node": 4, "hours": 7.0}
    value = numbers.get(option, 16 if option.endswith(("_node", "s", "grace")) else "named")
    for engine in ENGINES:
        if engine in USED_BY[option]:
            changed = emit(engine, _run(), _given(engine, **{option: value})[0]).text
            assert changed != emit(engine, _run(), _given(engine)[0]).text, engine
        else:
            assert option.replace("_", "-") in _problems(engine, **{option: value})


def test_a_run_made_for_several_nodes_gets_agents_and_its_spares() -> None:
    spec = tiny_run(plan={"data": 4}, fleet={"nodes": 2, "spares": 1}, train={"device": "cpu"})
    launch, _ = given(spec, "slurm", run_file="run.toml", run_dir="runs/x")
    assert (launch.agent, launch.nodes(spec), launch.ranks_per_node, launch.spares) == (True, 2, 2, 1)
    with pytest.raises(SpecErrors, match=r"fleet\.nodes = 2"):
        given(spec, "slurm", run_file="run.toml", run_dir="runs/x", nodes=4)
