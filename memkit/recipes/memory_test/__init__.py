"""The sweep of an edge network's memory over its number of edges, as its first program had it."""
