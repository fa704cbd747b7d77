"""Where the `tunebook` command starts: Ctrl-C ends it without a trace while its modules are imported, too."""

import sys

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> None:
    """Run the command."""
    try:
        from tunebook.commands.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
