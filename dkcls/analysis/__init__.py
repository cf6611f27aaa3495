"""Measurements of networks, as arrays: receptive fields, offsets and routing, and probes."""
