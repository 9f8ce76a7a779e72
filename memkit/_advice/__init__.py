"""Advice on memory: the catalog of remedies, and the choice of those that a run's facts call for."""
