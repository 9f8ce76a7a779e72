"""Advice on memory: the catalog of remedies, and the choice of remedies from a run's facts."""
