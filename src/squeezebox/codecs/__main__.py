"""Compile kernels for a process that goes on meanwhile: ``python -m squeezebox.codecs values float32``."""

import sys

from squeezebox.codecs._kernels import serve

serve(*sys.argv[1:])
