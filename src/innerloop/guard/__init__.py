"""Checks that run once per call, never inside a step."""
