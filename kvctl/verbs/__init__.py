"""The verbs, a file per subject; `app` puts them together."""
