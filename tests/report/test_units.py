import pytest

from megalith.report import units


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (999.96, "1k"),
        (12345, "12.3k"),
        (8.03e9, "8.03B"),
        (4.5e-7, "4.5e-07"),
        (None, units.NOTHING),
    ],
)
def test_counts_have_three_digits_and_a_letter(value, said):
    assert units.count(value) == said


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (80 * 2**30, "80 GiB"), (2**60, "1048576 TiB")]
)
def test_memory_is_in_binary_units(size, said):
    assert units.memory(size) == said


@pytest.mark.parametrize(("most", "unit"), [(0, "B"), (1023, "B"), (1024, "KiB"), (3 * 2**30, "GiB"), (2**70, "TiB")])
def test_an_axis_of_memory_has_one_unit(most, unit):
    assert units.memory_unit(most)[0] == unit


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (2.5e-4, "250 µs"),
        (0.0125, "12.5 ms"),
        (8.2, "8.2 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (273600, "3 d 04 h"),
        (float("nan"), units.NOTHING),
    ],
)
def test_durations_are_in_the_unit_that_fits(seconds, said):
    assert units.duration(seconds) == said


def test_a_clock_reads_like_one():
    assert (units.clock(5), units.clock(83), units.clock(3723)) == ("0:05", "1:23", "1:02:03")


def test_rates_carry_their_prefix():
    assert units.flops(989e12) == "989 TFLOP/s"
    assert units.percent(0.3412) == "34.1 %"
