"""A read-only page that shows the cache in a browser as the viewer's token allows; `kvctl console` serves it."""
