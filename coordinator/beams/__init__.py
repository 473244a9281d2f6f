"""Beam search: the texts of highest score."""
