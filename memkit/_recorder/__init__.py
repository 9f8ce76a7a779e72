"""Births and deaths of storages, real or without data: who made them, and where."""
