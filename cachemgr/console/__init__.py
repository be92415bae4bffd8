"""The console: one page that shows the cache and changes nothing."""
