"""The wheel, installed by pip: a first run from text to report, outside the repository and without it."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SHORT = (
    "plan.data=1",
    "plan.pipeline=1",
    "plan.zero=1",
    "train.steps=3",
    "train.global_batch=4",
    "validation.every=0",
    "optimizer.warmup=0",
)

pytestmark = pytest.mark.slow


def run(*command: str, folder: Path) -> str:
    unset = {"PYTHONPATH", "COLUMNS", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="builds the wheel: make setup")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out), folder=ROOT)
    (found,) = out.glob("megalith-*.whl")
    return found


def test_the_wheel_holds_the_package_and_what_its_commands_read(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "megalith").rglob("*") if path.is_file()}
    wanted = {name for name in package if "__pycache__" not in name}
    assert wanted | {"megalith/recipes/quickstart.toml", "megalith/clusters/own-accelerator.toml"} <= held
    assert not [name for name in held if name.startswith(("tests/", "docs/"))]


def test_a_first_run_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """The environment contains only the wheel, and borrows its dependencies, including torch, from this one."""
    home, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    run(sys.executable, "-m", "venv", str(home), folder=tmp_path)
    run(str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), folder=work)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # .pth files in there, such as ours, are not read
    where = run(str(home / "bin/python"), "-c", "import megalith; print(megalith.__file__)", folder=work)
    assert Path(where.strip()).is_relative_to(home)
    settings = [word for setting in SHORT for word in ("--set", setting)]
    said = run(str(home / "bin/megalith"), "quickstart", *settings, folder=work)
    for command in ("tokenizer train", "data prepare", "train", "generate", "report"):
        assert f"$ megalith {command}" in said
    assert "finished" in said and (work / "runs/quickstart/report.html").is_file()
    run(str(home / "bin/megalith"), "init", "own.toml", "--model", "tiny", folder=work)
    assert "own-accelerator.toml" in {path.name for path in site.rglob("*.toml")}
