"""Costs of the cache manager at scale. Each module that measures has a function `rows(blocks)`."""
