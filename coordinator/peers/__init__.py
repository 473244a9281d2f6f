"""Draft and verify services: discovery, placement of streams, and their messages."""
