"""Commands and notes keep the layout of their records: the tag comes last."""

import json

import pytest

from megalith.fleet import commands
from megalith.fleet.commands import Command, Note, Order, Replace, Restart
from megalith.fleet.tiers import Source, Tier


@pytest.mark.parametrize(
    ("order", "record"),
    [
        (
            Restart(Source(4, Tier.MEMORY), ("n0", "n1")),
            '{"source": {"step": 4, "tier": "memory", "elsewhere": []}, "placement": ["n0", "n1"], "after": 0.0, "kind": "restart"}',
        ),
        (Replace(1, "n1", "spare0"), '{"slot": 1, "node": "n1", "spare": "spare0", "kind": "replace"}'),
    ],
)
def test_a_record_of_an_order_ends_with_its_kind(order: Order, record: str) -> None:
    assert json.dumps(commands.dump(order)) == record
    assert commands.load(json.loads(record)) == order


def test_every_order_is_a_command_or_a_note() -> None:
    """Notes repeat what the placement and source of the next start contain; every other order must be carried out."""
    notes = {kind for kind, one in commands.ORDERS.classes.items() if issubclass(one, Note)}
    assert notes == {"replace", "roll_back", "quarantine_node"}
    assert all(issubclass(one, Command) for kind, one in commands.ORDERS.classes.items() if kind not in notes)
