"""What the stack costs and gains, measured."""
