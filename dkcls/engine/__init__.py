"""Training and evaluation: built objects in, checkpoints and figures out."""
