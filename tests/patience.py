"""The time for which tests wait."""

PATIENCE = 600.0  # seconds after which a test counts as hanging: no test depends on a machine's speed
