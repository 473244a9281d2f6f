"""A model with some of its blocks left out, which drafts for the whole one."""
