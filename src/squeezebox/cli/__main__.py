"""``python -m squeezebox.cli``: the command ``squeezebox`` where its script is not on the path."""

from squeezebox.cli import main

main()
