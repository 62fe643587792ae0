"""Show that the tests of findings detect their faults: run them against a commit that had these faults.

    python benchmarks/was_broken.py 689ccd2

The commit is written to a temporary folder. The tests in tests/findings use the product only through commands, files and ports, so they
can test that tree instead of this one. The script prints the failed assertion of each test. Any other end of a test (a failed import, an
option that the commit does not know, a timeout) proves nothing. The exit status is 0 if every test failed by an assertion.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "findings"


@dataclass
class Verdicts:
    """A plugin that records how each test ended. Name -> the text of the failed assertion, or why the test proves nothing."""

    proofs: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        error = call.excinfo
        if error is None:
            if call.when == "call":
                self.others[item.name] = "it holds there as well"
        elif call.when == "call" and error.errisinstance(AssertionError):
            line = " ".join(str(error.traceback[-1].statement).split())
            said = str(error.value).splitlines() or [""]
            self.proofs[item.name] = f"{line}\n      {said[0][:200]}"
        else:
            said = str(error.value).splitlines() or [""]
            self.others[item.name] = f"no assertion, but in its {call.when} {error.typename}: {said[0][:200]}"
        return (yield)


def ask(commit: str, tests: Sequence[str]) -> Verdicts:
    """Run tests against a commit, with all cases of sampled tests. Raises CalledProcessError if there is no such commit."""
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, check=True, capture_output=True).stdout
    verdicts = Verdicts()
    with tempfile.TemporaryDirectory(prefix="was-broken-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(folder, filter="data")
        os.environ["MEGALITH_TREE"], os.environ["MEGALITH_FULL"] = folder, "1"  # tests/full.py
        quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--no-header", "--no-summary", f"--rootdir={ROOT}"]
        pytest.main([*quiet, *tests], plugins=[verdicts])
    return verdicts


def main() -> int:
    """Run the tests against the commit on the command line, and print each test's outcome."""
    parser = argparse.ArgumentParser(description="Run the tests of findings against a commit that had them.")
    parser.add_argument("commit")
    parser.add_argument(
        "tests", nargs="*", default=[str(TESTS)], help="test files, or tests of them; default: all of tests/findings"
    )
    asked = parser.parse_args()
    verdicts = ask(asked.commit, asked.tests)
    for name, assertion in verdicts.proofs.items():
        print(f"was broken  {name}\n      {assertion}")
    for name, reason in verdicts.others.items():
        print(f"NO PROOF    {name}: {reason}")
    print(
        f"{len(verdicts.proofs)} of {len(verdicts.proofs) + len(verdicts.others)} tests failed by an assertion at {asked.commit}"
    )
    return 0 if verdicts.proofs and not verdicts.others else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
