"""``python -m raymm``: the command line."""

from raymm.cli import main

if __name__ == "__main__":
    main()
