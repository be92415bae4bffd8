"""What the router's view of the caches costs. Each module that measures has a function `rows`."""
