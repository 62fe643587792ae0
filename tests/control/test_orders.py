"""A user orders a run, through a file, to save, to stop or to remove a node. The policy decides."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith import events
from megalith.control import orders
from megalith.control.controller import run_here
from megalith.control.orders import Orders
from megalith.control.outcome import Outcome
from megalith.events import Order, Recovery
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.spec.fleet import FleetSpec
from tests.control.walk import checkpoints
from tests.patience import PATIENCE

STEPS, RANKS = 16, 4


def test_what_is_written_is_taken_once(tmp_path: Path) -> None:
    for what, node in (("save", ""), ("quarantine", "b"), ("stop", "")):
        orders.write(tmp_path, what, node)
    taken = Orders(tmp_path).take()
    assert [(one.what, one.node) for one in taken] == [("save", ""), ("quarantine", "b"), ("stop", "")]
    assert Orders(tmp_path).take() == [] and not list((tmp_path / orders.FOLDER).iterdir())


@pytest.mark.parametrize(("what", "node"), [("reboot", ""), ("save", "a"), ("quarantine", "")])
def test_an_order_that_is_none_is_not_written(what: str, node: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="order"):
        orders.write(tmp_path, what, node)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"save"', '{"what": "save"}', '{"what": "rm", "node": "", "time": NOW}',
     '{"what": "quarantine", "node": 3, "time": NOW}', '{"what": "save", "node": "", "time": 1.0}', "x" * 10_000],
)  # fmt: skip
def test_garbage_and_old_orders_are_removed_and_not_obeyed(text: str, tmp_path: Path) -> None:
    (tmp_path / orders.FOLDER).mkdir()
    (tmp_path / orders.FOLDER / "1.json").write_text(text.replace("NOW", str(time.time())))
    assert Orders(tmp_path).take() == [] and not list((tmp_path / orders.FOLDER).iterdir())


@pytest.mark.parametrize(
    "text", ["[" * 4096, '{"what": "save", "node": "", "time": 1' + "0" * 400 + "}", None], ids=["deep", "huge", "folder"]
)
def test_an_order_beside_a_malformed_one_is_obeyed(text: str | None, tmp_path: Path) -> None:
    bad = tmp_path / orders.FOLDER / "0.json"
    if text is None:
        bad.mkdir(parents=True)
    else:
        bad.parent.mkdir()
        bad.write_text(text)
    orders.write(tmp_path, "save")
    assert [one.what for one in Orders(tmp_path).take()] == ["save"]
    assert list(bad.parent.iterdir()) == ([bad] if text is None else []), "a folder is left alone"


def test_no_folder_is_no_order(tmp_path: Path) -> None:
    assert Orders(tmp_path).take() == []


def _run(folder: Path, when_it_runs: Callable[[], object], fleet: FleetSpec | None = None) -> Outcome:
    """Walk STEPS steps; call `when_it_runs` after the first checkpoint."""

    def act() -> None:
        end = time.monotonic() + PATIENCE
        while not list(folder.glob("state-3-*")) and time.monotonic() < end:
            time.sleep(0.01)
        when_it_runs()

    folder.mkdir()
    thread = threading.Thread(target=act)
    thread.start()
    job = Job(
        "tests.control.walk:walk", {"steps": STEPS, "nap": 0.15}, ranks=RANKS, run_dir=folder, preload=("tests.control.walk",),
        start_timeout=PATIENCE, silence_timeout=PATIENCE, threads=1,
    )  # fmt: skip
    spec = fleet or FleetSpec(nodes=2, spares=1, hang_floor=PATIENCE)
    try:
        return run_here(job, fleet=spec, identity="walk", store=lambda: checkpoints(folder))
    finally:
        thread.join()


def _answers(folder: Path) -> list[str]:
    return [one.answer for one in events.of_kind(events.read(folder), Order)]


@pytest.mark.slow
def test_a_run_that_is_to_save_goes_on_to_the_same_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert _run(folder, lambda: orders.write(folder, "save")).code == ExitCode.FINISHED
    assert _answers(folder) == ["a person orders that the state is saved: the ranks save, stop, and resume from the saved state"]
    for rank in range(RANKS):
        total = rank
        for step in range(STEPS):
            total = (total * 31 + step + 1) % 1_000_003
        assert json.loads((folder / f"state-{STEPS}-{rank}").read_text()) == [STEPS, total]


@pytest.mark.slow
def test_a_run_that_is_to_stop_saves_and_stops(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert _run(folder, lambda: orders.write(folder, "stop")).code == ExitCode.STOPPED
    assert len(_answers(folder)) == 1 and not list(folder.glob(f"state-{STEPS}-*"))


@pytest.mark.slow
def test_a_node_that_is_to_go_gives_its_place_to_a_spare(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    placement: list[str] = []

    def order() -> None:
        placement[:] = json.loads((folder / "ranks" / "fleet.json").read_text())["placement"]
        orders.write(folder, "quarantine", placement[1])

    assert _run(folder, order).code == ExitCode.FINISHED
    after = json.loads((folder / "ranks" / "fleet.json").read_text())["placement"]
    assert after[0] == placement[0] and after[1] != placement[1]
    assert not events.of_kind(events.read(folder), Recovery), "nothing went wrong"
