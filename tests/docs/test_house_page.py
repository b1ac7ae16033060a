"""The page of the house names the rooms that there are, and files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "squeezebox"
PAGE = (ROOT / "docs" / "house.md").read_text()
ROOMS = {door.parent.name for door in SOURCE.glob("*/__init__.py")}
WALKS = {
    title: re.findall(r"^\d+\. `([\w/]+\.py)`:", walk, re.M)
    for title, _, walk in (part.partition("\n") for part in PAGE.split("\n## ")[1:])
}


def test_the_drawing_and_the_table_have_every_room():
    drawing = re.search(r"```text\n(.*?)```", PAGE, re.S).group(1)
    drawn = {name for line in drawing.splitlines() for name in re.findall(r"\w+", line.rpartition("|")[0])}
    assert drawn == ROOMS
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == ROOMS


def test_there_are_four_walks_and_the_first_is_short():
    assert len(WALKS) == 4
    assert all(len(files) == len(set(files)) > 5 for files in WALKS.values())
    assert len(next(iter(WALKS.values()))) <= 12


@pytest.mark.parametrize("name", sorted({name for files in WALKS.values() for name in files}))
def test_a_walks_file_exists(name):
    assert (SOURCE / name).is_file()
