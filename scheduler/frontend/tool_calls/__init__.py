"""Tools and their calls: definitions of tools, and the forms in which models write calls."""
