"""Metrics, rates and limits of a running stack."""
