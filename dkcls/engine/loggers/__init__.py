"""Loggers: where a run's metrics go besides metrics.jsonl, one module for each."""
