"""The laboratory: faults on purpose, campaigns of them, replays, and simulations of long runs."""
