"""Times on a CPU are those of the host's clock."""

import time

import torch

from megalith.parallel.clock import Clock


def test_the_difference_of_two_marks_is_the_time_between_them():
    clock, begun = Clock(torch.device("cpu")), time.perf_counter()
    start = clock.mark()
    time.sleep(0.02)
    between = clock.seconds(start, clock.mark())
    assert 0.02 <= between <= time.perf_counter() - begun
    assert clock.seconds(start, start) == 0
