"""Every name the door promises is there, and one that it does not is an AttributeError."""

import pytest

import squeezebox


@pytest.mark.parametrize("name", squeezebox.__all__)
def test_every_public_name_can_be_reached(name):
    assert getattr(squeezebox, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="squeezebox.*'atach'"):
        squeezebox.atach  # noqa: B018
