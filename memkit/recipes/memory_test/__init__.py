"""Sweep of an edge network's memory over its number of edges, as in the program it was ported from."""
