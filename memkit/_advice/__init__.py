"""What to do about memory: the catalog of remedies, and which of them a run's facts call for."""
