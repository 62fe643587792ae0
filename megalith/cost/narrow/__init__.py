"""Narrow products of Megalith's trainer: their formats, their time, and the gain over wide products. No torch."""
