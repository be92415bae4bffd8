"""Metrics and rates of a running stack."""
