"""The verbs, a file per subject; `app` adds them to the command line."""
