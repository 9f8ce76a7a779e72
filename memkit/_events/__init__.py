"""Logs of memory: what they hold, and how they are written and read."""
