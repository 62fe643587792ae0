"""The memory that a plan states for a rank equals the count in a dry run of the written file."""

import random
from pathlib import Path

import pytest

from megalith.mesh import Mesh
from megalith.planner.plan_result import best_plans
from megalith.planner.request import PlanRequest, resolve
from megalith.planner.run_file import as_run
from megalith.spec import files
from tests.full import FULL
from tests.prove.dry import dry

pytestmark = pytest.mark.slow


SMALL = [("llama-1b", "h100:4", 4096, 8), ("llama-1b", "2xa100-40gb", 2048, 8)]
"""Models with most of their memory in blocks. If most is in the head, plans are off by up to a fifth (docs/planner.md)."""

MODELS = ("llama-1b", "llama3.2-1b", "llama3.2-3b", "llama2-7b", "qwen3-1.7b", "olmoe-1b-7b")
CLUSTERS = ("h100:8", "a100-40gb:8", "rtx-4090:8", "l40s:8", "mi300x:8")


def questions() -> list[tuple[str, str, int, int]]:
    """Return two small models, and in `make test-full` also ten drawn ones."""
    from megalith.spec.presets import presets

    draw, known = random.Random(23), [name for name in MODELS if name in presets()]
    drawn = [(draw.choice(known), draw.choice(CLUSTERS), draw.choice((2048, 4096)), draw.choice((16, 32))) for _ in range(10)]
    return SMALL + (drawn if FULL else [])


@pytest.mark.parametrize(("model", "cluster", "seq_len", "batch"), questions(), ids=str)
def test_a_plan_and_the_dry_run_of_its_file_agree(
    model: str, cluster: str, seq_len: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MEGALITH_CACHE", str(tmp_path))
    found = best_plans(resolve(PlanRequest(model=model, cluster=cluster, seq_len=seq_len, global_batch=batch, out=True)), top=1)
    best = found.found.choices[0].estimate.memory
    path = tmp_path / "plan.toml"
    path.write_text(as_run(found))
    spec = files.load(path).spec
    mesh = Mesh.of(spec.plan)
    rank = next(rank for rank in range(mesh.ranks) if mesh.coordinates(rank)["pipeline"] == best.rank)
    counted = dry(spec, rank).memory.peak
    assert best.allocated == pytest.approx(sum(counted.values()), rel=0.05)


def test_what_stays_free_covers_context_communicators_and_fragments():
    """Return the reserved memory: 4 GiB of 80, and in proportion."""
    for cluster in ("h100:8", "l4:8"):
        asked = resolve(PlanRequest(model="llama3-8b", cluster=cluster, seq_len=2048, global_batch=64))
        limit = asked.cluster.accelerator.memory
        assert limit is not None
        for one in best_plans(asked, top=3).found.choices:
            assert limit - one.estimate.memory.allocated >= 0.05 * limit
