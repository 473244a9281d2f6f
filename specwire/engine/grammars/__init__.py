"""Grammars of outputs: compiled by xgrammar, matched along tokens, as masks of the tokens that may follow."""
