"""One script per case; run one as `python -m benchmarks.cases.<case>` from the top of the checkout."""
