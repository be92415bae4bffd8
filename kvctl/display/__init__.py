"""How answers look: formats, tables, and the screen of `kvctl top`."""
