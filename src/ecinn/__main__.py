"""Start the command line: `ecinn` and `python -m ecinn`."""

import os
import sys


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
    cli.main()


if __name__ == "__main__":
    main()
