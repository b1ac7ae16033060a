"""The version of this Squeezebox."""

__version__ = "0.2.0"
