"""Fast versions of frequent operations, each with its plain definition."""
