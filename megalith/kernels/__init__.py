"""Fast versions of hot operations, each beside its plain definition."""
