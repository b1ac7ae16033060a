"""Measure what a step really costs on this machine.

In: a running step. Out: peaks in bytes.
May touch: torch's profiler and allocator counters; never the model.
"""

from squeezebox.profiling._peak import Peak, PeakMeter

__all__ = ["Peak", "PeakMeter"]
