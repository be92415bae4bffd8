"""Other engines on the same token ids, each in a separate environment."""
