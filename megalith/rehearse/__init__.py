"""The laboratory: injected faults, campaigns with many faults, replays, and simulations of long runs."""
