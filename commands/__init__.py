"""Built-in subcommands, one small module each; imported as vkit.commands."""
