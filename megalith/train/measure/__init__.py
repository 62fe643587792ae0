"""Measurements of a run while it trains: its yardstick of speed, its profile, its gradient noise, and curves for TensorBoard."""
