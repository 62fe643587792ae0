import pytest

from megalith.report.history import History, gather
from megalith.report.holding import named, who_holds_what
from megalith.spec.plan import Plan
from tests.report.run_folder import holdings, start


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["embedding", "blocks.0", "blocks.1", "blocks.2"], "embedding, blocks 0–2"),
        (["blocks.7", "blocks.1", "blocks.2", "head"], "blocks 1–2, 7, head"),
        (["blocks.3"], "block 3"),
        ([], "nothing"),
    ],
)
def test_consecutive_blocks_are_named_as_a_range(parts, said):
    assert named(parts) == said


def shown(plan: Plan) -> str:
    written = [start(plan=plan), *holdings(plan)]
    return who_holds_what(gather(written))


@pytest.mark.parametrize("plan", [Plan(data=2, tensor=2, pipeline=2), Plan(data=2, context=4), Plan()], ids=str)
def test_every_rank_has_a_cell(plan: Plan):
    picture = shown(plan)
    assert all(f">rank {rank}<" in picture for rank in range(plan.ranks))


def test_a_wide_mesh_shows_some_ranks_and_counts_the_rest():
    picture = shown(Plan(data=32, pipeline=2))
    assert picture.count('class="box"') == 32
    assert "16 columns that are not shown" in picture


def test_without_holdings_there_is_nothing_to_show():
    assert who_holds_what(History()) == ""
