"""A measured machine's cluster file predicts the measured times, keeps units, and is read back as it was written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.cost.constants import calibration
from megalith.cost.estimate import estimate
from megalith.cost.network import Line, Wires, gather, reduce
from megalith.cost.predicted import workload_of
from megalith.cost.profile import Core, Product
from megalith.cost.software import software_profile_of
from megalith.cost.time import Setting, core_seconds, product_seconds
from megalith.cost.workload import Workload
from megalith.machine import capacity
from megalith.planner.plan_result import best_plans
from megalith.planner.request import PlanRequest, resolve
from megalith.prove.calibrate import CalibrationResult, Point, Sizes, calibrate, cluster_of, text
from megalith.spec.cluster import ClusterSpec, catalogue, load
from megalith.spec.problem import SpecErrors
from tests.prepared import hollow_data
from tests.specs import tiny_run

SIZES = Sizes(product=256, inner=(32, 64, 128), memory=1 << 20, attention=(64, 2, 16), collective=(1 << 10, 1 << 16))
H100, GH200 = "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"
FAST = 1e9  # FLOP/s of products in fp32; bf16 has twice as many
RAMP = 48.0
MEMORY, LINK, LATENCY, START = 4e9, 2e8, 1e-3, 2e-6


def points(ranks: int, *, slower: float = 1.0) -> list[Point]:
    """Return the times of a machine with known figures."""
    found = [
        Point("product", format, inner, 2 * SIZES.product**2 * inner / rate * (1 + RAMP / inner))
        for format, rate in (("fp32", FAST), ("bf16", 2 * FAST)) for inner in (*SIZES.inner, SIZES.product)
    ]  # fmt: skip
    found += [Point("attention", way, SIZES.attention[0], seconds) for way, seconds in (("forward", 2e-3), ("both", 7e-3))]
    found += [
        Point("addition", "fp32", SIZES.memory, 3 * SIZES.memory / MEMORY),
        Point("starts", "", 50, 50 * START),
    ]
    wires = Wires(domain=ranks, fast=LINK, slow=LINK, latency=LATENCY, hop=0.0)
    for count in sorted({2, ranks} if ranks > 1 else ()):
        for size in SIZES.collective:
            found.append(Point("gather", str(count), size, gather(size, Line(count), wires)))
            found.append(Point("sum", str(count), size, reduce(size, Line(count), wires)))
    return [point._replace(seconds=slower * point.seconds) for point in found]


def machine(ranks: int, *, slower: float = 1.0, name: str = "cpu") -> CalibrationResult:
    found = points(ranks, slower=slower)
    return CalibrationResult(cluster_of(name, found, ranks=ranks, threads=3, sizes=SIZES), tuple(found))


def workload(cluster: ClusterSpec, **plan: int) -> Workload:
    spec = tiny_run(plan=plan, train={"global_batch": 8, "seq_len": 64})
    return replace(workload_of(spec), cluster=cluster)


def written(found: CalibrationResult, folder: Path) -> Path:
    file = folder / "machine.toml"
    file.write_text(text(found, host="here"))
    return file


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_figures_of_a_known_machine_are_found_in_their_units(ranks: int):
    cluster = machine(ranks).cluster
    device, measured = cluster.accelerator, cluster.measured
    assert measured is not None and measured.in_turn
    assert cluster.machine == measured.processor
    assert (cluster.count, cluster.per_node, measured.ranks, device.is_processor) == (ranks, ranks, ranks, True)
    assert device.peak == pytest.approx({"fp32": FAST, "bf16": 2 * FAST})
    assert device.memory_bandwidth == pytest.approx(MEMORY)
    assert measured.launch == pytest.approx(START)
    assert (measured.wide, measured.memory) == (pytest.approx(1), pytest.approx(1))
    if ranks == 1:
        assert (device.scale_up, measured.fast, measured.latency) == (None, None, None)
    else:
        assert (device.scale_up, measured.latency) == (pytest.approx(LINK, rel=1e-2), pytest.approx(LATENCY, rel=1e-2))


def test_what_was_measured_is_predicted_as_it_was_measured():
    cluster = machine(2).cluster
    setting = Setting.of(workload(cluster, data=2), calibration())
    for point in points(2):
        if point.kind == "product" and point.of == "fp32" and point.size > 32:  # shorter products are bound by memory
            product = Product("F", SIZES.product, point.size, SIZES.product)
            assert product_seconds(product, setting, "fp32") == pytest.approx(point.seconds, rel=1e-3)
        if point.kind in ("gather", "sum"):
            model = gather if point.kind == "gather" else reduce
            assert model(point.size, Line(int(point.of)), setting.wires) == pytest.approx(point.seconds, rel=0.05)
    tokens, heads, channels = SIZES.attention
    forward, backward = (Core(way, 1, heads, heads, tokens, tokens, channels, channels) for way in ("F", "I"))
    assert core_seconds(forward, setting) == pytest.approx(2e-3)
    assert core_seconds(backward, setting) == pytest.approx(5e-3)


@pytest.mark.parametrize("plan", [{"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2}])
def test_a_machine_twice_as_fast_takes_half_as_long(plan: dict[str, int]):
    """All measured rates together scale every term. Time outside of forward, backward and update is no rate of the machine."""
    slow, fast = (estimate(workload(machine(2, slower=slower).cluster, **plan)).time for slower in (1.0, 0.5))
    for term in ("compute", "tensor", "pipeline", "data", "bubble", "optimizer"):
        assert getattr(fast, term) == pytest.approx(getattr(slow, term) / 2, rel=1e-6), term
    assert fast.other == slow.other
    assert slow.step > slow.other


def test_doubled_rates_in_the_file_halve_the_predicted_time(tmp_path: Path):
    found = machine(2)
    device, measured = found.cluster.accelerator, found.cluster.measured
    assert measured is not None and measured.latency and device.memory_bandwidth and device.scale_up
    doubled = found.cluster.model_copy(
        update={
            "accelerator": device.model_copy(
                update={
                    "peak": {name: 2 * rate for name, rate in device.peak.items()},
                    "memory_bandwidth": 2 * device.memory_bandwidth, "scale_up": 2 * device.scale_up,
                }
            ),
            "measured": measured.model_copy(update={"launch": measured.launch / 2, "latency": measured.latency / 2}),
        }
    )  # fmt: skip
    times = [
        estimate(workload(load(str(written(replace(found, cluster=one), tmp_path))), data=2)).time
        for one in (found.cluster, doubled)
    ]
    assert times[1].step - times[1].other == pytest.approx((times[0].step - times[0].other) / 2, rel=1e-3)


def _digits(values: object) -> object:
    """Round numbers as a file does."""
    if isinstance(values, dict):
        return {key: _digits(value) for key, value in values.items()}
    return float(f"{values:.4g}") if isinstance(values, float) else values


@pytest.mark.parametrize(("name", "ranks"), [("cpu", 1), ("cpu", 2), (H100, 2), (GH200, 4)])
def test_a_file_is_read_back_as_it_was_written(tmp_path: Path, name: str, ranks: int):
    found = machine(ranks, name=name)
    file = written(found, tmp_path)
    again = load(str(file))
    assert _digits(again.model_dump()) == _digits(found.cluster.model_dump() | {"scale_out": again.scale_out})
    assert text(replace(found, cluster=again), host="here") == file.read_text()
    assert found.to_json()["cluster"]["measured"]["ranks"] == ranks


def test_a_device_of_the_catalogue_keeps_its_printed_rates_and_shares_are_measured(tmp_path: Path):
    file = written(machine(2, name=H100), tmp_path)
    cluster, printed = load(str(file)), catalogue()["h100"]
    assert 'accelerator = "h100"' in file.read_text()
    assert (cluster.accelerator, cluster.machine) == (printed, "h100")
    assert cluster.measured is not None and printed.memory_bandwidth and printed.scale_up
    assert not cluster.measured.in_turn
    assert cluster.measured.wide == pytest.approx(2 * FAST / printed.wide, rel=1e-3)
    assert cluster.measured.memory == pytest.approx(MEMORY / printed.memory_bandwidth, rel=1e-3)
    assert cluster.measured.fast == pytest.approx(LINK / printed.scale_up, rel=1e-2)


@pytest.mark.parametrize("name", ["cpu", GH200])
def test_the_start_of_an_operation_in_our_blocks_is_no_other_software_s(name: str):
    ours = workload(machine(2, name=name).cluster, data=2)
    others = replace(ours, software_profile=software_profile_of("pytorch", ours.plan))
    fitted = calibration().overheads["eager"].host
    assert Setting.of(ours, calibration()).overheads.host == pytest.approx(START)
    assert Setting.of(ours, calibration()).slower == 1.0
    assert Setting.of(others, calibration()).overheads.host == fitted
    assert Setting.of(others, calibration()).slower == calibration().slower(others.cluster.accelerator)


@pytest.mark.slow
def test_figures_of_ranks_that_share_a_processor_predict_no_other_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MEGALITH_CACHE", "")
    shared, gpus = machine(2).cluster, machine(2, name=H100).cluster
    assert shared.resized(1) is shared.resized(4) is None
    assert shared.resized(2) == shared
    assert gpus.resized(4) == gpus.model_copy(update={"count": 4})
    file = written(machine(2), tmp_path)
    asked = resolve(PlanRequest(model="tiny", cluster=str(file), seq_len=128, global_batch=8, format="fp32"))
    found = best_plans(asked, top=1, pareto=True)
    assert {point.devices for point in found.frontier} == {2}
    huge = PlanRequest(model="llama3-70b", cluster=str(file), seq_len=128, global_batch=8, format="fp32")
    with pytest.raises(SpecErrors) as caught:
        best_plans(resolve(huge), top=1)
    assert "this-machine would do" not in str(caught.value)
    run = tmp_path / "run.toml"
    run.write_text(f"""
name = "mine"
cluster = "{file}"
model.preset = "tiny"
data.path = "{tmp_path / "data"}"
train = {{ steps = 2, global_batch = 8, seq_len = 64 }}
optimizer.warmup = 1
""")
    hollow_data(tmp_path / "data", "text")
    monkeypatch.setenv("COLUMNS", "1000")
    printed = CliRunner().invoke(app, ["check", str(run), "--price"])
    assert printed.exit_code == 2
    assert "was measured with another number of ranks than the plan's 1," in printed.output


def test_links_that_nobody_published_are_the_measured_ones():
    device = machine(4, name=GH200).cluster.accelerator
    assert (device.scale_up, device.scale_up_domain) == (pytest.approx(LINK, rel=1e-2), 4)
    assert device.source["links"] == "measured"


@pytest.mark.slow
def test_two_ranks_measure_one_another_with_the_threads_of_a_run_s_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "processors", lambda: 4)
    found = calibrate(2, seconds=0.0, wanted="cpu", sizes=SIZES)
    kinds = {(point.kind, point.of) for point in found.points}
    assert {("product", "fp32"), ("product", "bf16"), ("attention", "both"), ("gather", "2"), ("sum", "2")} <= kinds
    assert all(point.seconds > 0 for point in found.points)
    cluster = load(str(written(found, tmp_path)))
    assert cluster.measured is not None
    assert (cluster.count, cluster.measured.ranks, cluster.measured.threads, cluster.measured.device) == (2, 2, 2, "cpu")
    assert estimate(workload(cluster, data=2)).time.step > 0


@pytest.mark.slow
def test_one_rank_measures_no_collective():
    found = calibrate(1, seconds=0.0, wanted="cpu", sizes=SIZES)
    assert not {"gather", "sum"} & {point.kind for point in found.points}
    assert found.cluster.measured is not None and found.cluster.measured.fast is None


@pytest.mark.parametrize(
    ("inner", "seconds"),
    [((32, 64), (1.0, 2.0)), ((32, 64), (2.0, 1.0)), ((32, 64), (1.0, 3.0))],
    ids=["exactly proportional", "noise", "slower when larger"],
)
def test_points_that_show_no_ramp_still_give_a_rate(inner: Sequence[int], seconds: Sequence[float]):
    noisy = [point for point in points(1) if point.kind != "product"]
    noisy += [Point("product", format, *pair) for format in ("fp32", "bf16") for pair in zip(inner, seconds, strict=True)]
    cluster = cluster_of("cpu", noisy, ranks=1, threads=1, sizes=SIZES)
    assert cluster.measured is not None
    assert cluster.accelerator.peak["fp32"] > 0 and cluster.measured.ramp >= 0


@pytest.mark.slow
def test_a_plan_names_the_source_of_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")
    file = written(machine(2), tmp_path)
    asked = resolve(PlanRequest(model="tiny", cluster=str(file), seq_len=128, global_batch=8, tokens="1M", format="fp32"))
    found, measured = best_plans(asked, top=1), asked.cluster.measured
    assert measured is not None
    assert (
        f"rates of the cluster were measured on {measured.processor} at {measured.at} UTC with 2 ranks of 3 threads "
        f"and torch {measured.torch}" in found.confidence.words
    )
    assert found.to_json()["sure"]["rests_on"] == found.confidence.words
