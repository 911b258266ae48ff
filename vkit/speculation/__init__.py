"""Drafting: cheap guesses at the tokens that follow, verified by the model in one step. See docs/speculation.md."""
