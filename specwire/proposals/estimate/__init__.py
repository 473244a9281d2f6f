"""Estimates from observation: what operations cost, how likely proposals are accepted; and the clock."""
