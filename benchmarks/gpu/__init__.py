"""The proof on a real GPU: what memkit predicts and promises, measured on the card of this machine.

`python -m benchmarks gpu` runs it; docs/virtual-gpu-proof.md says what it shows.
"""
