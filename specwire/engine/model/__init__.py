"""Loading a model of transformers and running packed passes through it."""
