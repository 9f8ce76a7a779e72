"""Which points: cells of a grid, and samples that keep a share of every cell."""
