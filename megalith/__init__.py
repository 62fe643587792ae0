"""Megalith: from "this model, this cluster" to a trained language model."""

__version__ = "0.1.0"
