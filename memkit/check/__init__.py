"""Habits in scripts that cost memory, found without running them."""
