"""Several processes as one coordinator."""
