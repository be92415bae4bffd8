"""Decides what runs next, and serves the public generation API."""
