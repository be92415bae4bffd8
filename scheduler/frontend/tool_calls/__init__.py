"""Calls of tools: their definitions, and the forms in which models write them."""
