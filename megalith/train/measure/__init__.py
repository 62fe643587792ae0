"""Measurements of a run while it trains: peak FLOP/s, profiles, rounding errors, and gradient noise."""
