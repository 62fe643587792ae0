"""Settings that must be made before any test imports torch or starts a process."""

import gc
import os
import random
import signal
from collections import defaultdict
from typing import Any

import pytest

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


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    """All workers collect the same cases."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"sampled tests: --seed {config.option.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of sampled tests. Tests of one file with as many cases keep the same ones, so that they share fixtures."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not FULL and item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for test, found in cases.items():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        kept = random.Random(f"{config.option.seed} {test.partition('::')[0]}").sample(found, min(marker.args[0], len(found)))
        left_out |= set(found) - set(kept)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
