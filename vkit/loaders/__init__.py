"""Checkpoints: one view of model files, whatever their format."""
