"""Tool-call families, one a file. The registry imports every module here; a new family needs no edit elsewhere."""
