"""An interface that goes down is noticed at once, and reported."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.machine import link, networks
from megalith.machine.networks import INTERFACE
from tests.patience import PATIENCE

NODES = ("a", "b")
pytestmark = pytest.mark.skipif(networks.missing() is not None, reason=networks.missing() or "")


def _ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_watcher_is_notified_when_its_own_interface_goes_down_and_not_of_others(tmp_path: Path) -> None:
    def watching(node: str) -> Callable[[], None]:
        def wait() -> None:
            link.watch(INTERFACE, (tmp_path / f"down-{node}").touch)
            (tmp_path / f"up-{node}").touch()
            _until((tmp_path / ("down-a" if node == "a" else "over")).exists)

        return wait

    with networks.joined(NODES) as network:
        watchers = {node: network.start(node, watching(node)) for node in NODES}
        _until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        assert not list(tmp_path.glob("down-*"))
        assert _ended(network.start("a", lambda: link.take_down(INTERFACE))) == 0
        assert _ended(watchers["a"]) == 0
        assert (network.is_connected("a"), network.is_connected("b")) == (False, True)
        (tmp_path / "over").touch()
        assert _ended(watchers["b"]) == 0
        assert not (tmp_path / "down-b").exists()
        network.plug("a", connected=True)
        assert network.is_connected("a")


def test_what_a_killed_process_left_goes_with_the_next_that_makes_some() -> None:
    def make() -> None:
        with networks.joined(["a"]):
            os.kill(os.getpid(), signal.SIGKILL)

    process = os.fork()
    if process == 0:
        make()
    assert _ended(process) == -signal.SIGKILL
    left = [f"mega{process}-{name}" for name in ("switch", "a")]
    assert all(Path(f"/var/run/netns/{name}").exists() for name in left)
    with networks.joined(["b"]) as network:
        networks.clear_abandoned()
        assert network.is_connected("b"), "this process lives"
    assert not any(Path(f"/var/run/netns/{name}").exists() for name in left)


def test_one_that_is_down_already_is_told_of_at_once(tmp_path: Path) -> None:
    with networks.joined(NODES) as network:
        network.plug("a", connected=False)
        assert _ended(network.start("a", lambda: link.watch(INTERFACE, (tmp_path / "down").touch))) == 0
        assert (tmp_path / "down").exists()


def test_what_enters_a_network_sees_only_its_interfaces(tmp_path: Path) -> None:
    def look() -> None:
        (tmp_path / "seen").write_text(" ".join(sorted(name for _, name in link.socket.if_nameindex())))
        (tmp_path / "named").write_text(str(link.named()))

    with networks.joined(NODES) as network:
        assert _ended(network.start("b", look)) == 0
    assert {INTERFACE, "lo"} <= set((tmp_path / "seen").read_text().split())
    assert (tmp_path / "named").read_text() == INTERFACE


def test_without_a_network_of_its_own_nothing_is_entered_and_nothing_named() -> None:
    assert networks.find({}) is None
    networks.enter("a")
    assert link.named({}) is None
    assert link.named({"GLOO_SOCKET_IFNAME": "eth0,eth1"}) is None
