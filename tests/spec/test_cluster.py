"""The catalogue's figures, the recognition of devices, and clusters."""

import itertools
from pathlib import Path

import pytest

from megalith.spec.cluster import catalogue, changed, counted, find, load
from megalith.spec.problem import SpecErrors


def test_dense_peaks_are_the_published_ones():
    assert catalogue()["v100-32gb"].peak["fp16"] == 125e12
    assert catalogue()["a100-80gb"].peak["bf16"] == 312e12
    assert catalogue()["h100"].peak["bf16"] == 989.4e12
    assert catalogue()["b200"].peak["bf16"] == 2250e12
    assert catalogue()["tpu-v5p"].peak["bf16"] == 459e12


BLACKWELL_ULTRA = ("b300", "gb300-nvl72")  # three fp4 products in the time of one fp8: the only exception


def test_peaks_are_dense_so_narrower_numbers_are_twice_as_fast_at_most():
    for accelerator in catalogue().values():
        rates = [accelerator.peak[p] for p in ("bf16", "fp8", "fp4") if p in accelerator.peak]
        ratios = [2, 3] if accelerator.name in BLACKWELL_ULTRA else [2, 2]
        for (wide, narrow), ratio in zip(itertools.pairwise(rates), ratios, strict=False):
            assert narrow == pytest.approx(ratio * wide, rel=2e-2), accelerator.name  # as published: an L40S has 362.05 and 733


def test_volta_has_no_bf16_and_ampere_no_fp8():
    assert "bf16" not in catalogue()["v100-32gb"].peak
    assert "fp8" not in catalogue()["a100-40gb"].peak


def test_links_count_one_direction():
    fast = {name: accelerator.scale_up for name, accelerator in catalogue().items()}
    assert (fast["a100-80gb"], fast["h100"], fast["h800"], fast["b200"]) == (300e9, 450e9, 200e9, 900e9)


def test_every_figure_has_a_source():
    covers = {
        "peak": ("peak",),
        "memory": ("memory", "memory_bandwidth"),
        "links": ("scale_up", "scale_out"),
        "power": ("power",),
        "price": ("price_per_hour",),
    }
    for accelerator in catalogue().values():
        for source, figures in covers.items():
            if any(getattr(accelerator, figure) for figure in figures):
                assert accelerator.source.get(source), (accelerator.name, source)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_found_by_the_name_torch_gives_it(device: str, name: str):
    found = find(device)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10G",
        "",
    ],
)
def test_a_device_with_other_peaks_is_not_taken_for_one_that_is_known(device: str):
    assert find(device) is None


def test_the_peak_of_a_cpu_is_not_guessed():
    assert catalogue()["cpu"].peak == {}


def test_a_cluster_is_a_name_and_a_number():
    cluster = load("h100:16384")
    assert (cluster.accelerator.name, cluster.count, cluster.nodes) == ("h100", 16384, 2048)


@pytest.mark.parametrize("text", ["8xh100", "8 x h100", "8*H100"])
def test_a_number_may_come_first_as_people_write_it(text: str):
    assert load(text) == load("h100:8")
    assert counted(text) and counted("h100:8") and counted("mine.toml") and not counted("h100")


@pytest.mark.parametrize("name", ["rtx4090", "l40s", "a10", "t4", "l4", "mi300x", "gh200", "h100-96gb", "gb300"])
def test_common_cards_are_known_with_all_that_one_node_needs(name: str):
    cluster = load(f"{name}:1")
    assert cluster.accelerator.memory and cluster.accelerator.memory_bandwidth and cluster.accelerator.wide


def test_a_name_alone_is_one_node():
    assert load("a100-80gb").count == 8
    assert load("cpu").count == 1


def test_fast_links_of_nvl72_join_nine_times_as_many():
    assert load("gb200-nvl72:144").fast == 9 * load("h100:64").fast


def test_interruptions_default_to_llama_3s():
    assert load("h100:16384").interruptions * 16384 * 54 * 24 == pytest.approx(419)


@pytest.mark.parametrize(("text", "hint"), [("h10", "'h100'"), ("a100-80", "'a100-80gb'"), ("H2000", "'h200'")])
def test_an_unknown_name_is_refused_with_the_nearest(text: str, hint: str):
    with pytest.raises(SpecErrors, match=hint):
        load(text)


@pytest.mark.parametrize("text", ["h100:", "h100:0", "h100:x", "h100:-1"])
def test_a_count_that_is_none_is_refused(text: str):
    with pytest.raises(SpecErrors, match="number of devices"):
        load(text)


def test_a_cluster_file_may_say_what_differs(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('accelerator = "h100"\ncount = 32\nprice_per_hour = 1.5\n')
    cluster = load(str(file))
    assert (cluster.count, cluster.per_node, cluster.price_per_hour, cluster.scale_out) == (32, 8, 1.5, 50e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('accelerator = "h1000"\ncount = 1', "Did you mean 'h100'"),
        ('accelerator = "h100"\ncoun = 1', "coun"),
        ("a = [", "cannot be read"),
    ],
)
def test_a_wrong_cluster_file_is_refused(tmp_path: Path, text: str, said: str):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(SpecErrors, match=said):
        load(str(file))


MEASURED = """
accelerator = "h100"
count = {count}
[measured]
device = "{device}"
processor = "x"
at = "2026-01-01 00:00"
torch = "2.9"
ranks = {ranks}
wide = 0.7
ramp = 100.0
attention_forward = 0.5
attention_backward = 0.4
memory = 0.9
launch = 1e-6
in_turn = {in_turn}
"""


def measured(folder: Path, **changes: object) -> Path:
    file = folder / "mine.toml"
    file.write_text(MEASURED.format(**{"count": 8, "device": "NVIDIA H100 80GB HBM3", "ranks": 8, "in_turn": "false"} | changes))
    return file


def test_figures_of_one_node_are_taken_for_several_like_it(tmp_path: Path):
    cluster = load(str(measured(tmp_path, count=64)))
    assert cluster.measured is not None and (cluster.nodes, cluster.measured.ranks) == (8, 8)


@pytest.mark.parametrize(
    ("changes", "keys", "said"),
    [
        (
            {"device": "NVIDIA A100-SXM4-80GB"},
            ["measured.device"],
            "the figures were not measured on h100, which torch calls NVIDIA H100",
        ),
        (
            {"count": 4},
            ["measured.ranks"],
            "count = 4. Measure with megalith doctor --calibrate FILE.toml --ranks 4, or set count = 8",
        ),
        (
            {"count": 16, "in_turn": "true"},
            ["measured.ranks"],
            "count = 16: the measured ranks shared one machine's processors",
        ),
        ({"count": 4, "device": "cpu"}, ["measured.device", "measured.ranks"], "Measure with megalith doctor --calibrate"),
        ({"ranks": 0}, ["measured.ranks"], "greater than 0"),
        ({"in_turn": '"perhaps"'}, ["measured.in_turn"], "valid boolean"),
    ],
)
def test_figures_of_another_machine_are_refused_with_a_way_out(
    tmp_path: Path, changes: dict[str, object], keys: list[str], said: str
):
    file = measured(tmp_path, **changes)
    with pytest.raises(SpecErrors) as caught:
        load(str(file))
    assert [problem.key for problem in caught.value.problems] == [f"{file}: {key}" for key in keys]
    assert said in " ".join(f"{problem.reason}. {problem.way_out}" for problem in caught.value.problems)


def test_a_table_of_figures_that_lacks_some_is_refused_with_all_of_them(tmp_path: Path):
    file = measured(tmp_path)
    file.write_text(
        "".join(line for line in file.read_text().splitlines(keepends=True) if not line.startswith(("wide", "launch")))
    )
    with pytest.raises(SpecErrors) as caught:
        load(str(file))
    assert [problem.key for problem in caught.value.problems] == [f"{file}: measured.wide", f"{file}: measured.launch"]


def test_pods_are_of_whole_domains_and_an_oversubscription_is_theirs():
    cluster = load("h100:64")
    assert changed(cluster, {"pod": 32, "oversubscription": 2.0}).oversubscription == 2
    for values, words in (
        ({"oversubscription": 2.0}, "oversubscription = 2 needs a pod size: set pod"),
        ({"pod": 12}, "pod = 12 is not a multiple of the 8 devices"),
        ({"pod": 16, "oversubscription": 0.5}, "greater than or equal to 1"),
        ({"scale_uot": 1e9}, "Did you mean 'scale_out'?"),
    ):
        with pytest.raises(SpecErrors) as raised:
            changed(cluster, values)
        (found,) = raised.value.problems
        assert words in f"{found.reason} {found.way_out}"


def test_a_changed_cluster_keeps_all_other_figures():
    cluster = load("h100:64")
    other = changed(cluster, {"scale_out": 1e9, "accelerator": {"power": 500}, "host": {"memory": 2**40}})
    assert (other.scale_out, other.accelerator.power, other.host.memory) == (1e9, 500, 2**40)
    assert changed(other, {"scale_out": cluster.scale_out, "accelerator": {"power": 700}, "host": {"memory": None}}) == cluster
