"""Tensor operations behind one name each; the only kernel import other code may use."""
