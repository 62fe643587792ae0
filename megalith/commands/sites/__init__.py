"""Commands about runs across sites."""
