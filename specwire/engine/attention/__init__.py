"""Attention of many sequences in one pass, over pages."""
