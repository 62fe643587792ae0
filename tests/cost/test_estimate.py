from dataclasses import replace
from importlib.resources import files

import pytest

from megalith import schedule as schedules
from megalith.cost.calibrate import BOUNDS, TIED, Observation, as_toml, choose, fit
from megalith.cost.constants import calibration, parse
from megalith.cost.estimate import StageTime, _bubble, _idle, estimate
from megalith.cost.memory import numbers, shares
from megalith.cost.network import Line, rate
from megalith.cost.parts import parts
from megalith.cost.profile import Product
from megalith.cost.time import Setting, SpentSeconds, product_seconds
from megalith.cost.workload import SoftwareProfile
from megalith.spec.model import MtpSpec
from megalith.spec.plan import Plan
from tests.cost.models import DIM, dense, mixture, workload


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(data=8, zero=3),
        Plan(tensor=4, pipeline=2, zero=0),
        Plan(context=2, data=2),
        Plan(pipeline=2, chunks=2, schedule="interleaved", zero=0),
    ],
    ids=str,
)
def test_the_terms_of_a_step_add_up_to_it(plan):
    time = estimate(workload(dense(), plan)).time
    terms = vars(time).copy()
    assert terms.pop("step") == pytest.approx(sum(terms.values()))


def test_processors_that_send_tokens_compute_nothing():
    """A large product takes twice as long on half of the processors, and its bytes move as before."""
    load = workload(mixture(), Plan(data=4, expert=4))
    half = replace(load, software_profile=replace(load.software_profile, senders=calibration().devices["hopper"].units // 2))
    settings = [Setting.of(one, calibration()) for one in (load, half)]
    large = Product("F", 16_384, 16_384, 16_384, 1, weight=True)
    first, second = (product_seconds(large, setting, "bf16") for setting in settings)
    assert second == pytest.approx(2 * first, rel=0.01)
    assert settings[0].bandwidth == settings[1].bandwidth


def test_gradients_added_up_over_microbatches_are_reduced_less_often():
    """Under an interleaved schedule a stage computes as many microbatches in a row as there are pipeline ranks; without chunks,
    nothing comes between two microbatches of the only stage."""
    run = SoftwareProfile(reduces="run")
    chunked = Plan(pipeline=2, chunks=2, schedule="interleaved", zero=2, data=2)
    times = [workload(dense(), plan, software_profile=run).reductions for plan in (chunked, Plan(pipeline=2, zero=2, data=2))]
    assert times == [8 // 2, 1]
    assert workload(dense(), chunked).reductions == 8
    after, each = (
        estimate(workload(dense(), chunked, software_profile=software_profile)).time.data
        for software_profile in (run, SoftwareProfile())
    )
    assert after < each


def test_experts_are_predicted_too():
    found = estimate(workload(mixture(), Plan(data=4, expert=4)))
    assert found.time.expert > 0
    assert found.time.step == pytest.approx(sum(v for k, v in vars(found.time).items() if k != "step"))


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches"), [("1f1b", 4, 1, 8), ("1f1b", 8, 1, 32), ("interleaved", 4, 2, 8)]
)
def test_the_closed_form_of_the_bubble_is_the_simulated_program(name, ranks, chunks, microbatches):
    forward, backward = 1.0, 2.0
    program = schedules.lower(schedules.build(name, ranks=ranks, microbatches=microbatches, chunks=chunks), 0)
    timeline = schedules.simulate(program, {"F": forward / chunks, "B": backward / chunks})
    load = workload(dense(8), Plan(pipeline=ranks, chunks=chunks, schedule=name, zero=0), global_batch=microbatches)
    stages = [StageTime(SpentSeconds(products=forward), SpentSeconds(products=backward))] * ranks
    assert microbatches * (forward + backward) + _bubble(load, stages, 0, 0.0) == pytest.approx(timeline.end)


def test_more_microbatches_make_the_bubble_a_smaller_share():
    few, many = (estimate(workload(dense(), Plan(pipeline=4, zero=0), global_batch=n)).time for n in (8, 64))
    assert many.bubble / many.step < few.bubble / few.step


def test_what_does_not_fit_is_said():
    huge = workload(dense(64), Plan(microbatch=64), seq_len=8192, global_batch=64)
    assert not estimate(huge).fits
    assert estimate(workload(dense(), Plan())).fits


def test_a_calibration_survives_its_toml():
    figures = calibration()
    again = parse(as_toml(figures, command="none", note="", seen={}))
    assert {k: pytest.approx(v, rel=1e-3) for k, v in figures.flat().items()} == again.flat()


def test_the_fit_starts_within_its_bounds():
    start = parse(files("megalith.cost").joinpath("starts.toml").read_text())
    assert start.flat().keys() == calibration().flat().keys()
    assert start.families == calibration().families
    assert start.beside == calibration().beside
    for name, value in start.flat().items():
        bounds = BOUNDS.get(name.partition(".")[2])
        assert bounds is None or bounds.low <= value <= bounds.high, name


def test_figures_that_are_one_start_as_one():
    start = parse(files("megalith.cost").joinpath("starts.toml").read_text()).flat()
    assert all(start[follower] == start[leader] for follower, leader in TIED.items())


def test_a_fit_finds_a_figure_that_was_changed():
    figures = calibration()
    truth = figures.changed({"hopper.memory": 0.6})
    loads = [workload(dense(), Plan(microbatch=micro), seq_len=2048, global_batch=16) for micro in (1, 2, 4, 8)]
    pairs = [((load, parts(load)),) for load in loads]
    seen = [Observation("one", False, pair, choose(pair, truth)[1].time.step) for pair in pairs]

    def wrong(candidate):
        return sum(abs(choose(one.choices, candidate)[1].time.step / one.seconds - 1) for one in seen)

    assert wrong(fit(seen, figures, sweeps=3, prior=0.0)) < 0.2 * wrong(figures)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("gpipe", 3), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("backward", [2.0, 2.3, 3.0])
@pytest.mark.parametrize(("ranks", "rounds"), [(4, 8), (6, 20)])
def test_a_closed_form_is_the_simulated_idling(name: str, chunks: int, backward: float, ranks: int, rounds: int):
    program = schedules.lower(schedules.build(name, ranks=ranks, microbatches=rounds, chunks=chunks), 0)
    timeline = schedules.simulate(
        program, {"F": 1 / chunks, "B": backward / chunks, "I": backward / 2 / chunks, "W": backward / 2 / chunks}
    )
    assert _idle(name, ranks, rounds, chunks, backward) == pytest.approx(timeline.end - max(timeline.busy))


def test_blocks_of_mtp_modules_are_reduced_and_updated_too():
    """These blocks are on the last pipeline rank, which then reduces and updates more than the first."""
    model = dense(2)
    further = model.head.model_copy(update={"ahead": MtpSpec(block=model.blocks[0], depth=2, weight=0.1)})
    plan = Plan(pipeline=2, data=2, zero=1)
    loads = [workload(one, plan) for one in (model, model.model_copy(update={"head": further}))]
    last = [numbers(load, traced := parts(load), shares(load, traced).held[-1]).dense for load in loads]
    without, with_them = (estimate(load).time for load in loads)
    assert with_them.optimizer / without.optimizer == pytest.approx(last[1] / last[0], rel=1e-3)
    assert with_them.data > without.data


def test_copies_of_experts_are_gathered_among_their_own_shards_and_added_up_between():
    """With two copies of the state half as many ranks gather one copy, and each adds its half of the gradients to another
    rank's."""
    plan = Plan(data=8, expert=2, replicate=2, zero=1)
    small, large = (
        workload(mixture(hidden=size), plan, software_profile=SoftwareProfile(overlap_data=False)) for size in (128, 256)
    )
    more = 2 * 3 * 8 // 2 * 128 * DIM  # blocks, matrices, experts of a rank, channels
    wires = Setting.of(large, calibration()).wires
    shards, copies = Line(2, 2), Line(2, 4)
    moved = (4 + 2) * more / 2 / rate(shards, wires)  # gradients and weights, half of which the rank already has
    moved += 2 * (4 * more / 2) / 2 / rate(copies, wires)
    assert estimate(large).time.data - estimate(small).time.data == pytest.approx(moved)
