"""A run's key for tests."""

from megalith.fleet.secure.key import VARIABLE, Key

KEY, OTHER_KEY = Key("k" * 64), Key("o" * 64)
GIVEN = {VARIABLE: KEY.text}
"""The environment of processes that have the key."""
