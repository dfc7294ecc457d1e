"""Benchmarks of the GPU data plane: python -m bench.gpu --only 1,3 (make bench-gpu ONLY=1,3)."""
