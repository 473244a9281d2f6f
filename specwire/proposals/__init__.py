"""Draft tokens as chains and trees, proposals that have arrived or are under way, and what they may bring."""
