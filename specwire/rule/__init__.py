"""Accept, recover, sample: the exact rule and what is drawn for it; no network, no clock."""
