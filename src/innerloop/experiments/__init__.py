"""Experiments that run as commands: one file each."""
