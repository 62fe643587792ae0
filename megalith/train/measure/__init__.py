"""Measurements of a run while it trains: its yardstick of speed, its profile, and its gradient noise."""
