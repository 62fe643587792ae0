"""A world of ranks is forked from a process that has done other things."""

import subprocess
import sys

import pytest

GARBAGE = """
import gc, os, torch
from megalith.prove.worlds import run_ranks

class Finalized:
    def __init__(self):
        self.cycle, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            print("finalized by a rank", flush=True)

def collect(rank):
    return gc.collect()

torch.set_num_threads(1)
gc.disable()
Finalized()
run_ranks(collect, 2)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_rank_does_not_finalize_the_garbage_of_the_process_it_comes_from() -> None:
    """It may belong to threads that a fork does not have. This runs without the settings of the other tests, which freeze it too."""
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
