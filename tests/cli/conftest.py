"""Commands say nothing of their progress, however slow the machine, unless a test asks for it."""

import pytest


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setattr("squeezebox.cli._show._SILENT", 3600.0)
