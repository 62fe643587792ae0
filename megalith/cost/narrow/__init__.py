"""Narrow products as this project's trainer computes them: their formats, their time, and whether they pay. No torch."""
