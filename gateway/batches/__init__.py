"""Batches: files of queries that are answered as low-priority fill, each line once. `runner.py` runs them."""
