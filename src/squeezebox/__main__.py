"""``python -m squeezebox`` is the command ``squeezebox``."""

from squeezebox.cli import main

main()
