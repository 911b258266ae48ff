"""Measuring: load on an engine or a server, and the figures, files, tables and plots made of it."""
