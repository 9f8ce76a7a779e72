"""Benchmarks: twins of plain PyTorch, memkit and peers; one committed result file per case."""
