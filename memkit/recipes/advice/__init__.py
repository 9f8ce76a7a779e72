"""Verified advice: what would make a training step smaller, tried on the step itself before it is told."""
