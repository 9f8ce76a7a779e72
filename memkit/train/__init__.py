"""One training step, and the order of steps."""
