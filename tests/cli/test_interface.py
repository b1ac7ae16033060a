"""gloo uses the network that leads to the first rank, unless the user names one or all stays here."""

import os
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from squeezebox.cli._interface import name_interface

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture
def environment(monkeypatch):
    """A copy of the environment's variables, with torchrun's word and none of gloo's."""
    given = {"TORCHELASTIC_RUN_ID": "any", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.setattr(os, "environ", given)
    return given


@pytest.mark.parametrize("first", ["127.0.0.1", "localhost", "no-such-host.invalid", ""])
def test_what_stays_here_or_leads_nowhere_is_left_to_gloo(environment, first):
    environment["MASTER_ADDR"] = first
    name_interface()
    assert "GLOO_SOCKET_IFNAME" not in environment


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # a network for documentation: nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        return asked.getsockname()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for addresses")
def test_the_interface_of_the_address_is_named_unless_the_user_did(environment):
    environment["MASTER_ADDR"] = own_address()
    name_interface()
    assert environment.pop("GLOO_SOCKET_IFNAME") in [name for _, name in socket.if_nameindex()]
    environment["GLOO_SOCKET_IFNAME"] = "mine"
    name_interface()
    assert environment.pop("GLOO_SOCKET_IFNAME") == "mine"
    del environment["TORCHELASTIC_RUN_ID"]  # not torchrun's process
    name_interface()
    assert "GLOO_SOCKET_IFNAME" not in environment


@pytest.fixture
def machines():
    """Two network namespaces joined by a link; what a host's own name stands for, only that host reaches."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    mark = uuid.uuid4().hex[:6]
    ends = {f"sq{mark}{end}": f"v{mark}{end}" for end in "ab"}  # of a link, by the namespace
    names = list(ends)
    commands = [
        *(f"netns add {name}" for name in names),
        "link add {} type veth peer name {}".format(*ends.values()),
        *(f"link set {end} netns {name}" for name, end in ends.items()),
        *(f"-n {name} addr add 10.0.0.{names.index(name) + 1}/24 dev {ends[name]}" for name in names),
        *(f"-n {name} link set {device} up" for name in names for device in (ends[name], "lo")),
    ]
    try:
        for command in commands:
            if subprocess.run(["ip", *command.split()], capture_output=True).returncode:
                pytest.skip("may not make network namespaces here")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(machine, rank, folder, **variables):
    command = (
        f"-m torch.distributed.run --nnodes 2 --node-rank {rank} --nproc-per-node 1 --master-addr 10.0.0.1"
    )
    folder.mkdir()
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, *command.split(), "--master-port", "29500"]
        + ["-m", "squeezebox.cli", "devices", "measure"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_machines_meet(machines, tmp_path):
    ranks = [start(machine, rank, tmp_path / machine) for rank, machine in enumerate(machines)]
    said = [rank.communicate(timeout=180) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "a second" in said[0][0] and (tmp_path / machines[0] / "devices.toml").is_file()
