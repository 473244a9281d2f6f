"""Certificates, bearer tokens, and the files that they are reloaded from."""
