"""`kvctl`: what operators see of a running stack and do to it. Talks to the services through their stubs only."""
