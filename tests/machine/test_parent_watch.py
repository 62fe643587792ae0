import os
import subprocess
import sys

from tests.fleet.conftest import ROOT
from tests.patience import PATIENCE

WATCH = """
import sys, time
from megalith.machine import parent_watch
parent_watch.watch(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(3600)
"""
FOLLOW = """
import os, sys
from megalith.machine import parent_watch
parent_watch.die_with_parent(int(sys.argv[1]))
print("followed")
"""


def test_the_end_of_the_pipe_ends_the_process():
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", WATCH, str(reading)], pass_fds=(reading,), cwd=ROOT, stdout=subprocess.PIPE)
    os.close(reading)
    assert process.stdout is not None
    assert process.stdout.readline() == b"watching\n"
    assert process.poll() is None
    os.close(writing)
    assert process.wait(timeout=PATIENCE) != 0
    process.stdout.close()


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    mine = subprocess.run([sys.executable, "-c", FOLLOW, str(os.getpid())], cwd=ROOT, capture_output=True, check=False)
    orphan = subprocess.run([sys.executable, "-c", FOLLOW, "1"], cwd=ROOT, capture_output=True, check=False)
    assert (mine.returncode, mine.stdout) == (0, b"followed\n")
    assert (orphan.returncode, orphan.stdout) == (1, b"")
