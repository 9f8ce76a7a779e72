"""Adapters for programs that people already use: pytest, trainers. Each imports its program when it is used."""
