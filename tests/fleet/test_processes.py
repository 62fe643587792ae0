import fcntl
import os
import resource
import subprocess
import sys

import pytest

from megalith.fleet.fork_server import Handle, readable
from megalith.fleet.processes import method
from tests.patience import PATIENCE


def test_ranks_are_forked_on_linux_and_spawned_elsewhere():
    assert method({}) == ("fork" if sys.platform == "linux" else "spawn")
    assert method({"MEGALITH_START": "spawn"}) == "spawn"


def test_another_word_for_the_way_to_start_is_refused():
    with pytest.raises(ValueError, match=r"MEGALITH_START=thread .* fork or spawn"):
        method({"MEGALITH_START": "thread"})


def test_macos_refuses_to_fork(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert method({}) == "spawn"
    with pytest.raises(ValueError, match="macOS"):
        method({"MEGALITH_START": "fork"})


def test_a_handle_follows_a_process_to_its_end_and_not_beyond():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    handle = Handle(process.pid)
    assert handle.alive()
    handle.send(9)
    assert process.wait(timeout=PATIENCE) == -9
    assert not handle.alive()
    handle.send(9)  # the id may belong to another process by now, so no signal is sent
    handle.close()
    assert not Handle(process.pid).alive()


def test_a_descriptor_above_1023_can_be_waited_for():
    low, write = os.pipe()
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 2000) if resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2000 else low
    try:
        assert not readable(high, seconds=0)
        os.write(write, b"x")
        assert readable(high, seconds=PATIENCE)
    finally:
        for descriptor in {low, high, write}:
            os.close(descriptor)
