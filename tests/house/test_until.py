"""Continuous integration ends in time on a slow machine, and says what it left out."""

import subprocess
import sys


def test_tests_that_would_begin_later_are_skipped_and_counted():
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/house/test_door.py"]
    ended = subprocess.run([*run, "--until", "0"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no time was left" in ended.stdout and "passed" not in ended.stdout
