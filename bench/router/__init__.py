"""Costs of the router's view of the caches. Each module that measures has a function `rows`."""
