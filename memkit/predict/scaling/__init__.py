"""Scaling: how the memory of a step grows with its size, from a few sizes."""
