"""Constraints on a model's output: JSON schemas, patterns, choices, grammars, tagged sections.

A constraint is checked and compiled by `vkit.structured.compiler.GrammarCompiler`; what comes out is a
`vkit.sequence.Grammar`, which masks the tokens of one sequence. No torch, no engine, no HTTP here.
"""
