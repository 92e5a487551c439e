"""Experiments that run as commands: one folder each."""
