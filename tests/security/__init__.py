"""Whether tenants stay apart, with the real processes."""
