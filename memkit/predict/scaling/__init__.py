"""Scaling laws: how the memory of a step grows with its size, derived from a few sizes."""
