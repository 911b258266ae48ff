"""`vkit completion`: the completion script for a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from vkit.commands import _render


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the completion script for a shell.

    Plug-in commands are included. To switch it on:

    bash: source <(vkit completion bash)

    zsh: vkit completion zsh > "${fpath[1]}/_vkit"

    fish: vkit completion fish > ~/.config/fish/completions/vkit.fish
    """
    from vkit.manual import command_tree, completion_script

    _render.write_text(completion_script(shell, command_tree()))
