"""The OpenAI-compatible HTTP API: JSON in, the one generation service of this process, JSON or events out."""
