"""A page that shows the cache in a browser, read only, as the viewer's token allows: `kvctl console` serves it."""
