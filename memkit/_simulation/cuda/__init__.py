"""CUDA on a simulated GPU."""
