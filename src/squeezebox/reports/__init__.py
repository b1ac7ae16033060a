"""Turn step records into what people and programs read.

In: schema's StepRecord. Out: text tables and JSON files, written whole or not at all.
May touch: files it is told to write; no torch.
"""

from squeezebox.reports._report import Report, human_bytes, write_whole

__all__ = ["Report", "human_bytes", "write_whole"]
