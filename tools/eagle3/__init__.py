"""`specwire train-eagle3`; see `training`."""
