"""What is imported when, and what happens where an optional library is missing."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numba_and_blosc2_wait_for_their_first_use() -> None:
    run(
        "import sys, squeezebox.codecs as c; c.get('zero4')\n"
        "assert not {'numba', 'blosc2'} & set(sys.modules)"
    )


@pytest.mark.slow
def test_without_numba_the_reference_serves() -> None:
    script = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'numba' else found(n, *a)\n"
        "{}import torch, squeezebox.codecs as c\n"
        "x = torch.randn(5000, generator=torch.Generator().manual_seed(0))\n"
        "for n in ('zero3', 'minmax4', 'sign'): print(c.dumps(c.get(n).pack(x)).hex())\n"
        "p = c.get('entropy').pack(x, 0.1, c.Hints(lag=1))\n"
        "print(c.dumps(p).hex(), c.get('entropy').unpack(p).sum())"
    )
    hidden = run(script.format("sys.modules['numba'] = None\n"))
    assert hidden == run(script.format("u.find_spec = found\n"))


@pytest.mark.slow
def test_without_blosc2_the_error_says_what_to_install() -> None:
    run(
        "import sys; sys.modules['blosc2'] = None\n"
        "import torch, squeezebox.codecs as c\n"
        "from squeezebox.schema import CodecError\n"
        "try: c.get('entropy').pack(torch.randn(99), 0.1)\n"
        "except CodecError as error: assert 'pip install blosc2' in str(error)\n"
        "else: raise SystemExit('no error')"
    )
