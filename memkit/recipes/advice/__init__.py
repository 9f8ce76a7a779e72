"""Verified advice: changes that reduce a training step's memory, each tried on the step itself first."""
