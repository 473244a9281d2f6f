"""Texts as tokens and bytes, and what a text must match."""
