import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.file import dump, read
from megalith.schedule.table import SCHEDULES, build, schedule_problem_texts

GOOD = """
# two microbatches through two ranks
name = by hand
stages = 2
microbatches = 2
placement = 0 1

rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1I1 1W1
"""


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(2, 9))
@settings(deadline=None)
def test_every_schedule_survives_its_file(name, half, microbatches):
    schedule = build(name, ranks=2 * half, microbatches=microbatches, chunks=SCHEDULES[name].chunks.nearest(2))
    assert read(dump(schedule)) == schedule


def test_a_file_is_a_schedule_that_a_plan_can_name(tmp_path):
    path = tmp_path / "mine.schedule"
    path.write_text(GOOD)
    built = build(f"file:{path}", ranks=2, microbatches=2)
    assert (built.name, built.placement, len(built.rows[1])) == ("by hand", (0, 1), 5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("stages = 2", "stages = two", ["line 4: stages = 'two'. Write a number"]),
        ("placement = 0 1", "placement = first", ["line 6: placement = 'first'. Write one rank for each stage"]),
        ("placement = 0 1", "order = 0 1", ["line 6: 'order = 0 1' is not understood"]),
        ("0F1", "0X1", ["line 8: '0X1' is not an action"]),
        ("0F1", "0F1 0SEND_F1", ["line 8: 0SEND_F1 is communication"]),
        ("rank 1", "rank 0", ["line 9: rank 0 has a row already"]),
        ("rank 1", "rank 2", ["rows for ranks [0, 2]: ranks are numbered from 0 without a gap"]),
        ("placement = 0 1", "placement = 0", ["placement has 1 ranks for stages = 2", "Every rank needs a stage"]),
        ("placement = 0 1", "", ["placement missing"]),
        (
            "microbatches = 2",
            "microbatches = 1",
            ["rank 0: 0F1 0B1: there are only 2 stages", "rank 1: 1F1 1I1 1W1: there are only 2 stages"],
        ),
        ("name = by hand", "mirrored = 3", ["mirrored = 3, but there are only 2 microbatches"]),
        ("name = by hand", "name =", ["line 3: name = ''. Write a name."]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(old, new, said):
    with pytest.raises(ValueError, match=r".") as refused:
        read(GOOD.replace(old, new, 1))
    for text in said:
        assert text in str(refused.value)


def test_all_mistakes_are_said_at_once():
    with pytest.raises(ValueError, match=r"(?s)line 4.*line 8.*line 9"):
        read(GOOD.replace("stages = 2", "stages = x").replace("0F1", "0Q1").replace("1F1", "1Q1"))


def test_a_file_that_does_not_fit_the_plan_is_refused_with_every_reason(tmp_path):
    path = tmp_path / "mine.schedule"
    path.write_text(GOOD)
    found = schedule_problem_texts(f"file:{path}", ranks=4, microbatches=3, chunks=2)
    assert [text.split(" = ")[0] for text in found] == ["ranks", "microbatches", "chunks"]
    assert "Use ranks = 2 or another file." in found[0]
    assert "1 a rank (2 stages on 2 ranks)" in found[2]


def test_a_file_that_would_hang_is_refused(tmp_path):
    path = tmp_path / "stuck.schedule"
    path.write_text(GOOD.replace("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1").replace("1F0 1B0 1F1", "1F0 1F1 1B0"))
    (found,) = schedule_problem_texts(f"file:{path}", ranks=2, microbatches=2, chunks=1)
    assert "deadlock: rank 0 at 0B0 waits for 0RECV_B0 of rank 1" in found


def test_a_file_that_leaves_work_undone_is_refused(tmp_path):
    path = tmp_path / "short.schedule"
    path.write_text(GOOD.replace(" 1W1", ""))
    (found,) = schedule_problem_texts(f"file:{path}", ranks=2, microbatches=2, chunks=1)
    assert "backward of stage 1, microbatch 1: B 0, I 1, W 0 times" in found


def test_a_bidirectional_file_is_refused_by_a_plan(tmp_path):
    path = tmp_path / "both.schedule"
    path.write_text(dump(build("dualpipe", ranks=2, microbatches=4)))
    (found,) = schedule_problem_texts(f"file:{path}", ranks=2, microbatches=4, chunks=1)
    assert "Use schedule = 'dualpipe'" in found


def test_a_file_that_is_not_there_is_refused_with_its_path(tmp_path):
    (found,) = schedule_problem_texts(f"file:{tmp_path}/none", ranks=2, microbatches=2, chunks=1)
    assert "cannot be read" in found
    with pytest.raises(ValueError, match="cannot be read"):
        build(f"file:{tmp_path}/none", ranks=2, microbatches=2)
