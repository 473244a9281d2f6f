"""What the engine does on a GPU, with a target of eight billion parameters made on the spot."""
