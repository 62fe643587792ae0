"""Fast versions of frequent operations, each with a plain version that defines its result."""
