"""The tool that runs tests of findings against an old commit: its criterion for a proof."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.findings.product import ROOT

# Tests for the tool, one for each outcome. The second one passes, and so must not count as a proof. The last one is sampled, and all of
# its cases must run.
TESTS = """
import os
from pathlib import Path

import pytest

from tests.full import sampled

def test_fails():
    assert Path(os.environ["MEGALITH_TREE"], "megalith").is_dir() and 1 + 1 == 3

def test_holds():
    assert Path(os.environ["MEGALITH_TREE"], "megalith").is_dir()

def test_is_late():
    raise TimeoutError("nothing came")

def test_knows_no_option():
    import no_such_module

@sampled(1)
@pytest.mark.parametrize("case", [7, 8, 9])
def test_is_sampled(case):
    assert case < 7
"""
HOOKS = "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure"


@pytest.mark.slow
def test_only_a_failed_assertion_is_a_proof(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        # an unpacked archive has no commits, and the tool needs them
        pytest.skip("this tree is no clone, so no commit can be asked")
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    (tmp_path / "conftest.py").write_text(HOOKS)
    asked = [sys.executable, str(ROOT / "benchmarks/was_broken.py"), "HEAD", str(file)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = done.stdout
    assert "was broken  test_fails\n      assert Path(os.environ" in printed
    assert "NO PROOF    test_holds: it holds there as well" in printed
    assert "NO PROOF    test_is_late: no assertion, but in its call TimeoutError: nothing came" in printed
    assert "NO PROOF    test_knows_no_option: no assertion, but in its call ModuleNotFoundError" in printed
    assert all(f"was broken  test_is_sampled[{case}]" in printed for case in (7, 8, 9)), "cases were deselected"
    assert "4 of 7 tests failed by an assertion at HEAD" in printed
    assert done.returncode == 1
