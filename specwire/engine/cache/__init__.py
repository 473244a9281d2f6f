"""Pages of keys and values: allocation, sharing, and the memory that layers write to."""
