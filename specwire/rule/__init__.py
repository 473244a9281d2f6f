"""The exact acceptance rule, the samplers and the random numbers they use; no network, no clock."""
