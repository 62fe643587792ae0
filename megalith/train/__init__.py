"""Training: from a resolved run to steps, checkpoints and events."""
