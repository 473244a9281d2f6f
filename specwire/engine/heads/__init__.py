"""Draft heads: what makes a target propose by itself; their files, and what they compute."""
