"""Start the command line: `ecinn` and `python -m ecinn`."""

import os
import sys
import threading


def main() -> None:
    """Prepare the environment, then run `ecinn.cli`."""
    # OpenMP reads this when torch is loaded. Threads that wait must sleep instead of spin:
    # spinning on cores that other processes need slows everything down a hundredfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from ecinn import cli
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except ImportError as error:
        if os.environ.get("ECINN_DEBUG"):
            raise
        sys.exit(f"error: cannot start: {error} (set ECINN_DEBUG=1 to see the traceback)")
    try:
        cli.main()
    except SystemExit as stop:
        _end_with_threads(stop.code)
        raise


def _end_with_threads(code: object) -> None:
    """End at once if a classifier still hangs in a thread: torch would abort the process."""
    if any(thread.name == "ecinn-abandoned" for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
