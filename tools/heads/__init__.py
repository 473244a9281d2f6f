"""Training of the heads with which a target drafts for itself; `specwire.engine.heads` serves them."""
