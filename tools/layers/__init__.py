"""Search for the blocks that a target can spare when it drafts; `specwire.engine.layers` leaves them out."""
