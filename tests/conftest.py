"""Settings that must be made before any test imports torch or starts a process."""

import gc
import os
import random
import signal
from collections import defaultdict
from typing import Any

import pytest

from tests import warm
from tests.full import FULL

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked rank hangs in OpenMP if its parent ever used more than one thread
os.environ.setdefault("CUDA_HOME", "")  # on a machine without a GPU, torch's compiler would log that it found none
# A suite that is started with nohup ignores SIGHUP, and every process that it starts would inherit this: tests of
# SIGHUP would fail.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# A forked rank must not finalize the garbage of earlier tests: that of torch may belong to threads that a fork does not have.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="determines the cases of sampled tests that run; default: other cases each time")


def pytest_configure(config: pytest.Config) -> None:
    given: int | None = getattr(config, "workerinput", {}).get("seed", config.option.seed)
    config.option.seed = random.SystemRandom().randrange(1 << 20) if given is None else given
    warm.install()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    """All workers collect the same cases."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"sampled tests: --seed {config.option.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of sampled tests. Tests of one file with as many cases keep the same ones, so that they share fixtures."""
    cases = defaultdict[str, dict[pytest.Item, int]](dict)
    for item in items:
        marker = None if FULL else item.get_closest_marker("sampled")
        if marker:
            size, together = marker.args
            cases[item.nodeid.partition("::" if together else "[")[0]][item] = size
    left_out = set[pytest.Item]()
    for name, sizes in cases.items():
        draw = random.Random(f"{config.option.seed} {name.partition('::')[0]}")
        left_out |= {*sizes} - {*draw.sample([*sizes], min(max(sizes.values()), len(sizes)))}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
