"""Fast versions of hot operations, each with its plain definition."""
