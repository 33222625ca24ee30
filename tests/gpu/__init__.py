"""Tests and benchmarks for a GPU: ``make gpu``; with ``ARGS=--rehearse`` on a CPU with small sizes and stand-ins."""
