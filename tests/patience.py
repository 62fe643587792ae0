"""How long tests wait."""

PATIENCE = 600.0  # seconds before a test is taken to hang: no test is about how fast a machine is
