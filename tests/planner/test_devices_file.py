"""devices.toml: written, read again, written by hand, and refused in one sentence."""

import pytest

from squeezebox.schema import Device, DeviceLink, Devices, FormatError

BY_HAND = """
[[devices]]
name = "old"
memory_bytes = "2GiB"
speed = 1

[[devices]]
name = "new"
memory_bytes = 8589934592
speed = 4.5

[[links]]
between = ["new", "old"]
bytes_per_second = "1GB"
latency_seconds = 1e-5
"""


def test_a_file_by_hand_is_read_and_written_again(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(BY_HAND)
    devices = Devices.load(path)
    assert devices.devices == (
        Device(name="old", memory_bytes=2**31, speed=1.0),
        Device(name="new", memory_bytes=2**33, speed=4.5),
    )
    assert devices.links == (DeviceLink(between=("new", "old"), bytes_per_second=1e9, latency_seconds=1e-5),)
    assert devices.link(0, 1) == devices.link(1, 0)
    assert devices.link(0, 1).seconds(10**9) == pytest.approx(1.0 + 1e-5)
    assert devices.link(1, 1).seconds(10**9) == 0.0
    devices.save(path)
    assert Devices.load(path) == devices
    one = devices.chosen([1])
    one.save(path)
    assert Devices.load(path) == one and not one.links


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("speed = 1\n", "", r"devices\[0\].speed is missing"),
        ("speed = 1\n", "speed = -1\n", r"devices\[0\].speed is -1, not a finite number from 0"),
        ("speed = 1\n", "speed = 0\n", "'old' has 2147483648 bytes and speed 0, of which neither may be 0"),
        ('"2GiB"', '"much"', "memory_bytes much is no size"),
        ('name = "new"', 'name = "old"', "2 devices are called 'old'"),
        (
            '["new", "old"]',
            '["new", "newer"]',
            "a link between new and newer comes 1 times, or leads nowhere",
        ),
        ("speed = 1\n", 'speed = 1\ntype = "CPU"\n', "'old' is of type 'CPU', which is none of"),
        ("[[links]]", "[[other]]", "other is unknown"),
        ('"1GB"', "0", "carries 0 bytes a second"),
        ("[[devices]]", "[devices", "no list of devices"),
        (
            BY_HAND,
            BY_HAND + '[[devices]]\nname = "third"\nmemory_bytes = 1\nspeed = 1\n',
            "there is no link between old and third",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(old, new, message, tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(BY_HAND.replace(old, new))
    with pytest.raises(FormatError, match=message) as caught:
        Devices.load(path)
    assert "Write it again with 'squeezebox devices measure', or correct it." in str(caught.value)


RATED = BY_HAND.replace(
    "speed = 4.5\n",
    'speed = 4.5\ntype = "cpu"\n'
    'flops_per_second = 1e12\nbytes_per_second = "20GB"\nover_roofline = [0.5, 1, 4]\n',
)


def test_rates_may_be_left_out_and_are_written_again(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(RATED)
    devices = Devices.load(path)
    old, new = devices.devices
    assert not old.is_rated and new.is_rated
    assert (new.bytes_per_second, new.call_seconds, new.over_roofline) == (2e10, 0.0, (0.5, 1.0, 4.0))
    devices.save(path)
    assert Devices.load(path) == devices
    path.write_text(RATED.replace("[0.5, 1, 4]", "[2, 1, 4]"))
    with pytest.raises(FormatError, match="not the least, the median and the most"):
        Devices.load(path)


def test_a_list_without_links_is_no_pipelines(tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(BY_HAND[: BY_HAND.index("[[links]]")])
    with pytest.raises(FormatError, match="there is no link between new and old, which a pipeline needs"):
        Devices.load(path).require_links()
