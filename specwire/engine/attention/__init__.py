"""Attention of many sequences in one pass, over a paged KV cache."""
