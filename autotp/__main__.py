"""`python -m autotp` is the `autotp` command."""

from autotp.cli import main

if __name__ == "__main__":
    main()
