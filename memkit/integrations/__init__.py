"""Adapters for other tools: pytest and trainers. Each imports its tool only when it is used."""
