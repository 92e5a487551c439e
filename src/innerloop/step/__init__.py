"""Eq. 2: a training step as a pure function."""
