"""Tests of recovery without a real cluster: injected faults, campaigns with many faults, replays, and simulations of long runs."""
