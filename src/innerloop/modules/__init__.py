"""A module as a function of its weights."""
