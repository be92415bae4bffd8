"""What the cache manager costs at scale. Each module that measures has a function `rows(blocks)`."""
