"""How the embedded pair was trained and evaluated: `make train`."""
