"""Loading a transformers model, and running packed passes through it."""
