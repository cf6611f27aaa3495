"""What runs and networks have learnt, as arrays and as pictures."""
