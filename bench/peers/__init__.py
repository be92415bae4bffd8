"""Other engines on the same token ids, each in an environment of its own."""
