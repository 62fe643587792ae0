"""A run across sites over a wire with a real delay and rate that loses packets and breaks."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import link as benchmark
from megalith.events import Merge, of_kind, read
from megalith.fleet.rank_info import PLACEMENT
from megalith.fleet.secure import peers
from megalith.machine import networks, wire
from megalith.machine.wire import Conditions, Wire
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, folder_of, fragments, sent_after, verdict_bytes, wire_bytes
from megalith.spec.sites.cut import FRAME_BYTES
from megalith.spec.sizes import model_parameters
from megalith.train.sites.messages import LENGTH_BYTES, LINE_BYTES, Hello
from tests.fleet.conftest import until
from tests.keys import GIVEN
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, finish, prepare_text, signal_yourself, start_site, when
from tests.specs import tiny_run

pytestmark = [pytest.mark.engines, pytest.mark.skipif(wire.missing() is not None, reason=wire.missing() or "")]
NODES = ("site0", "site1")
STEPS, BATCH = 12, 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _spec(data: Path, **sites: Any) -> RunSpec:
    """A run that sends 100 kB in each round and direction."""
    return tiny_run(
        model={"vocab": 264, "layers": 2},
        data={"path": str(data)},
        checkpoint={"every": 3},
        train={"steps": STEPS, "global_batch": BATCH},
        sites={"inner_steps": 2, "fragments": 2, "overlap": 1, "grace": 120.0, **sites},
    )


def _over(link: Wire | None, spec: RunSpec, folder: Path, site: int) -> dict[int, int]:
    """Start the rank of a site, at its end of the wire."""
    assert spec.sites is not None
    environment = dict(GIVEN)
    if link is not None:
        assert link.network is not None
        environment |= {networks.VARIABLE: link.network.family, PLACEMENT: NODES[site]}
        addresses = tuple(f"{link.network.address(number)}:29400" for number in range(2))
        spec = spec.model_copy(update={"sites": spec.sites.model_copy(update={"addresses": addresses})})
    return start_site(spec, folder, site, environment=environment)


def _trained(spec: RunSpec, folder: Path, link: Wire | None) -> dict[str, Any]:
    codes = finish(_over(link, spec, folder, 0) | _over(link, spec, folder, 1))
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in sorted(folder.rglob("rank-*.log")))
    return final_state(folder)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the end of the same run without a link."""
    return _trained(_spec(data), tmp_path_factory.mktemp("undisturbed"), None)


def test_lost_packets_change_no_bit(data: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    with wire.between(NODES, Conditions(50, 10, loss=0.02, seed=3)) as link:
        found = _trained(_spec(data), tmp_path / "run", link)
        assert sum(link.lost) > 0
    assert_same_bits(found, undisturbed)


@contextmanager
def _cut(link: Wire, seconds: float) -> Iterator[None]:
    """While the block runs, cut the wire for some seconds once a part of a fragment has crossed."""

    def act() -> None:
        until(lambda: link.crossed[1] > 60_000, seconds=PATIENCE)
        link.cut(cut=True)
        time.sleep(seconds)
        link.cut(cut=False)

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_a_connection_that_breaks_in_the_middle_of_a_fragment_changes_no_bit(
    data: Path, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP gives up after CUT_SECONDS. The sites connect again, and resend the data in flight."""
    monkeypatch.setattr(peers, "CUT_SECONDS", 4)
    with wire.between(NODES, Conditions(1, 50)) as link, _cut(link, 10.0):
        found = _trained(_spec(data), tmp_path / "run", link)
        sent = link.crossed[1]
    assert_same_bits(found, undisturbed)
    assert sent > _theory(_spec(data).sites, _spec(data), STEPS) + 1000, "a part of a fragment crossed twice"


def test_a_site_that_is_killed_comes_back_over_the_link(data: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 60
    spec = _spec(data, decides=0, grace=3.0).model_copy(deep=True)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})

    def wait_for_the_other() -> None:
        made = list(of_kind(read(folder), Merge))
        if any(one.left for one in made) and not any(one.joined for one in made):
            time.sleep(0.5)

    with wire.between(NODES, Conditions(20, 40)) as link, when("step", None, site=0, act=wait_for_the_other):
        with when("step", 7, site=1, act=lambda: signal_yourself(signal.SIGKILL)):
            first, second = _over(link, spec, folder, 0), _over(link, spec, folder, 1)
            assert finish(second) == [-signal.SIGKILL]
        assert finish(first | _over(link, spec, folder, 1)) == [0, 0]
    made = list(of_kind(read(folder), Merge))
    left, joined = ([getattr(one, name) for one in made if getattr(one, name)] for name in ("left", "joined"))
    assert left == joined == [[1]] and made[-1].merged == [0, 1] and made[-1].samples == steps * BATCH
    one, other = final_state(folder), final_state(folder_of(folder, 1))
    assert all((other[name] == tensor).all() for name, tensor in one.items() if name.startswith("weights."))


def _theory(sites: SitesSpec | None, spec: RunSpec, steps: int) -> int:
    """Return the bytes that a site, not the decider, sends for its differences until everything is merged."""
    assert sites is not None
    shapes = {name: each.shape for name, each in model_parameters(spec.model.build()).items()}
    cut = fragments(shapes, sites)
    sent = [number for step in range(1, steps + 1) for number in sent_after(step, sites)]
    last = set(sent_after(steps, sites))
    return sum(wire_bytes(cut[number]) for number in [*sent, *(one.number for one in cut if one.number not in last)])


def _word_bytes() -> int:
    """Return the bytes of a site's keep-alive messages."""
    return len(Hello("0" * 2 * LINE_BYTES, 0).pack()) + LENGTH_BYTES + FRAME_BYTES


@pytest.mark.parametrize("method", [{}, {"bits": 4, "fragments": 3, "overlap": 2}])
def test_bytes_on_the_wire_are_those_of_theory(method: dict[str, Any], data: Path) -> None:
    """Two more rounds add the exact number of bytes. Both directions have the differences, and one also has the verdicts."""
    crossed, theory, merges = [], [], []
    for rounds in (2, 4):
        spec = benchmark.run_of(str(data), "0.1M", 4 * rounds, {"inner_steps": 4, **method})
        (ran, _), both = benchmark.measured(spec, Conditions(1000, 1))
        crossed.append(both)
        merges.append(ran.merges)
        theory.append(_theory(spec.sites, spec, 4 * rounds))
    deciding = theory[1] - theory[0] + (merges[1] - merges[0]) * verdict_bytes()
    beside = crossed[1] - crossed[0] - deciding
    assert beside % _word_bytes() == 0 and 0 <= beside < deciding / 10, (
        "words of sites that are still there, as often as time says"
    )
    assert theory[0] < crossed[0] < theory[0] + merges[0] * verdict_bytes() + 8192, "beside hellos"


def test_a_wire_needs_root_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "root" in (wire.missing() or "")
