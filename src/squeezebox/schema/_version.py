"""The version of this Squeezebox."""

__version__ = "0.1.0"
