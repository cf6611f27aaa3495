"""Faults injected into the real train.py, one module for each kind.

`drill.py` runs them all, the tests a short form.
"""
