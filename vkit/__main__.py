"""Where the program starts: `vkit`, and `python -m vkit`. Nothing is imported before an interrupt is seen to."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]  # `-m` puts the current folder first; a torch.py there would run instead of torch

import gc
import signal
from types import FrameType

INTERRUPTED = 130


def start() -> int:
    """Run the program on the process's arguments and return its exit status."""
    with_traceback = signal.getsignal(signal.SIGINT)
    if with_traceback is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _leave)
    from vkit.starting import starting

    with starting():
        from vkit.cli import main
    try:
        signal.signal(signal.SIGINT, with_traceback)
        status = main()
        _leave_lost_ranks(status)
        return status
    except KeyboardInterrupt:  # before main could look out for it, or after
        _leave(signal.SIGINT, None)
        return INTERRUPTED
    finally:
        gc.freeze()  # the interpreter's last search for cycles would take longer than all its other goodbyes


def _leave_lost_ranks(status: int) -> None:
    """End at once if a rank was lost: threads of the process group may still wait for it, inside C++ that the
    interpreter's goodbyes would abort."""
    team = sys.modules.get("vkit.parallel.team")
    if team is not None and team.lost.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave(signum: int, frame: FrameType | None) -> None:
    """End at once: nothing has been opened yet, and unwinding imports would only show where they were."""
    os.write(2, b"vkit: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(start())
