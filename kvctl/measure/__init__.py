"""What a running stack does: its metrics, its rates, and its limits."""
