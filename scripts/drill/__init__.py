"""Faults injected into the real train.py, one module for each kind.

`python -m scripts.drill` runs them all, the tests a short form.
"""
