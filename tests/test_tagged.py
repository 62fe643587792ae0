"""Tagged values are equal after a round trip through JSON, and their records keep one layout."""

import json
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import pytest
from pydantic import ValidationError

from megalith.tagged import Family


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Shape:
    kind: ClassVar[str] = ""
    size: float


@dataclass(frozen=True)
class Round(Shape):
    pass


@dataclass(frozen=True)
class Circle(Round):
    kind: ClassVar[str] = "circle"
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Box(Shape):
    kind: ClassVar[str] = "box"
    corners: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RoundBox(Box):
    kind: ClassVar[str] = "round_box"


@dataclass(frozen=True)
class Line:
    kind: ClassVar[str] = "line"


SHAPES = Family(Shape, Line)


def test_a_family_has_every_class_with_a_tag() -> None:
    assert SHAPES.classes == {"line": Line, "box": Box, "circle": Circle, "round_box": RoundBox}


@pytest.mark.parametrize("value", [Circle(2.0), Box(1.0, ((0, 1), (2, 3))), RoundBox(0.5), Line()])
@pytest.mark.parametrize("place", [None, 0, 1])
def test_a_value_comes_back_from_json(value: Shape | Line, place: int | None) -> None:
    family = Family(Shape, Line, place=place)
    back = family.load(json.loads(json.dumps(family.dump(value))))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (None, '{"size": 2.0, "colour": "red", "type": "circle"}'),
        (0, '{"type": "circle", "size": 2.0, "colour": "red"}'),
        (1, '{"size": 2.0, "type": "circle", "colour": "red"}'),
    ],
)
def test_the_tag_has_its_place_in_a_record(place: int | None, text: str) -> None:
    assert json.dumps(Family(Shape, key="type", place=place).dump(Circle(2.0))) == text


@pytest.mark.parametrize("record", [{"kind": "star"}, {"size": 1.0}, {"kind": ""}, {"kind": ["circle"]}, [], "circle", None])
def test_a_record_without_a_known_tag_is_refused(record: object) -> None:
    with pytest.raises(ValueError, match="is unknown: it must be one of line, box, circle, round_box"):
        SHAPES.load(record)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"size": "large"}, {"size": 1.0, "colour": "no colour"}])
def test_fields_that_do_not_fit_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SHAPES.load({"kind": "circle", **fields})


def test_two_classes_of_a_family_cannot_share_a_tag() -> None:
    @dataclass(frozen=True)
    class Ring(Line):
        pass

    with pytest.raises(ValueError, match="Line and Ring both have the tag 'line'"):
        Family(Line)
