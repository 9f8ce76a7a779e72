"""Records to paper: what a memory log says, as a page for people. Nothing here imports torch."""
