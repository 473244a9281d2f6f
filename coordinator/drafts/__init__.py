"""Drafts that the coordinator makes itself, without a service."""
