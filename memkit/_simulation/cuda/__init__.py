"""CUDA as it would be on a GPU that is not there."""
