"""Pages of keys and values: who holds which, what is shared, where a layer writes."""
