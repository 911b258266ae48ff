"""Reasoning parsers, one a file. The registry imports every module here; a new parser needs no edit elsewhere."""
