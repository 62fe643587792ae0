"""Moments on a CPU are the host's."""

import time

import torch

from megalith.parallel.clock import Clock


def test_the_difference_of_two_marks_is_the_time_between_them():
    clock = Clock(torch.device("cpu"))
    start = clock.mark()
    time.sleep(0.02)
    assert 0.02 <= clock.seconds(start, clock.mark()) < 5
    assert clock.seconds(start, start) == 0
