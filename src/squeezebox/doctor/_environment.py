"""Whether this environment is what it says it is: versions, devices, and installed packages as they came."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from squeezebox.doctor._packages import Installed, check_files, check_forwards, installed, loaded_modules
from squeezebox.profiling import free_bytes
from squeezebox.reports import EnvironmentCheck, human_bytes
from squeezebox.schema import (
    CheckedEnvironment,
    CheckedPackage,
    EnvironmentFault,
    Fault,
    OptionError,
    in_one_line,
)
from squeezebox.steps import Progress

MODEL_PACKAGES = (
    *("torch", "torchvision", "torchaudio", "triton", "timm", "transformers", "tokenizers", "safetensors"),
    *("huggingface-hub", "accelerate", "diffusers", "peft", "lightning", "pytorch-lightning", "torchmetrics"),
    *("sentence-transformers", "open-clip-torch", "ultralytics", "squeezebox"),
)
_BUILT_FOR_ONE_TORCH = ("torchvision", "torchaudio")  # neither imports with another build of torch
_NAMED = (
    *("squeezebox", "torch", "numpy", "numba", "blosc2", "triton", "torchvision", "timm", "transformers"),
    *("accelerate", "lightning"),
)
_COMPILERS = ("g++", "clang++", "c++", "cl")


def check_environment(
    packages: Iterable[str] | None = None, *, on_progress: Progress | None = None
) -> EnvironmentCheck:
    """Check versions and devices, and whether installed packages still are what was installed.

    Of each package: whether its files have the hashes of its RECORD, with none missing and none added, and
    whether the loaded classes' ``forward``, ``__call__`` and ``backward`` are what their source defines
    (always asked of torch). This is no protection against somebody who can also write the RECORD.

    Args:
        packages: names of distributions, which are then imported too, unless their files are not as
            installed. None: those of a list of packages for models that are installed, as far as they
            are loaded.
        on_progress: called with (done, total, note).

    Returns:
        Versions, devices, and for each package how many files and classes were looked at and which are
        not as installed. As text, ``to_dict()`` and ``save(path)``.

    Raises:
        OptionError: a named package is not installed.

    After "Be careful with PyPI packages: you may unconsciously spread backdoor model weights" (MLSys 2023).
    """
    progress = on_progress or (lambda done, total, note: None)
    packages = [packages] if isinstance(packages, str) else packages
    checked, faults = list[CheckedPackage](), list[EnvironmentFault]()
    chosen = list(_chosen(packages))
    for package in chosen:
        row, found = _examined(package, progress)
        if not found and packages is not None:
            found = _faults_of(_import_here, package)
        elif not found and package.name in _BUILT_FOR_ONE_TORCH:
            found = _faults_of(_import_apart, package)
        checked.append(row)
        faults += found
    for number, package in enumerate(_with_torch(chosen)):
        modules = loaded_modules(package.sources)
        faults += check_forwards(package.name, modules)
        if number < len(checked):
            checked[number] = replace(checked[number], loaded=len(modules))
    return EnvironmentCheck(
        CheckedEnvironment(
            facts=dict(_facts()),
            packages=tuple(checked),
            faults=(*_unmet(), *faults),
            notes=tuple(_notes()),
        )
    )


def _chosen(packages: Iterable[str] | None) -> Iterator[Installed]:
    for name in MODEL_PACKAGES if packages is None else packages:
        found = installed(name)
        if found is not None:
            yield found
        elif packages is not None:
            raise OptionError(f"no package '{name}' is installed here; give its name as pip lists it.")


def _with_torch(packages: list[Installed]) -> list[Installed]:
    torch_itself = None if any(each.name == "torch" for each in packages) else installed("torch")
    return packages if torch_itself is None else [*packages, torch_itself]


def _examined(package: Installed, progress: Progress) -> tuple[CheckedPackage, list[EnvironmentFault]]:
    row = CheckedPackage(name=package.name, version=package.version, skipped=package.skipped)
    found = [
        EnvironmentFault(
            fault=Fault.BROKEN, package=package.name, subject=name, detail=f"cannot be read: {why}"
        )
        for name, why in package.damaged.items()
    ]
    if package.skipped:
        return row, found
    return replace(row, files=len(package.hashed)), [*found, *check_files(package, progress)]


def _faults_of(run: Callable[[str], str], package: Installed) -> list[EnvironmentFault]:
    """What comes of importing its modules in this way."""
    wrong = {name: run(name) for name in _top_modules(package)}
    return [
        EnvironmentFault(fault=Fault.BROKEN, package=package.name, subject=name, detail=detail)
        for name, detail in wrong.items()
        if detail
    ]


def _top_modules(package: Installed) -> list[str]:
    """Its module, or where none is called like it, all of its packages."""
    tops = {file.parts[0] for file in package.files if file.parts[1:] == ("__init__.py",)}
    tops |= {file.stem for file in package.files if len(file.parts) == 1 and file.suffix == ".py"}
    own = re.sub(r"[-.]+", "_", package.name)
    return [own] if own in tops else sorted(name for name in tops if not name.startswith("_"))


def _import_here(name: str) -> str:
    """Why it cannot be imported; "" where it is."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the package's own code raises
        return in_one_line(error)
    return ""


def _import_apart(name: str) -> str:
    """The last line of what importing it in a process of its own says; "" where it works."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"ends with status {done.returncode}"])[-1]


def _facts() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})"
    for name in _NAMED:
        found = installed(name)
        if found is not None:
            yield name, found.version
    if torch.cuda.is_available():
        yield "CUDA", str(torch.version.cuda)
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            yield f"device {number}", f"{device.name}, {human_bytes(device.total_memory)}"
    else:
        yield "device", "none; this torch computes on the processor"
    yield "processor", f"{os.cpu_count()} cores, of which torch uses {torch.get_num_threads()}"
    try:
        yield "free memory", human_bytes(free_bytes(torch.device("cpu")))
    except OptionError:
        yield "free memory", "not known on this system"
    yield "C++ compiler", _compiler() or "none"


def _compiler() -> str | None:
    """Where the first one is that torch.compile would look for on a processor."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _unmet() -> Iterator[EnvironmentFault]:
    """What Squeezebox needs and does not find; its own requirements are all of the form name>=version."""
    own = installed("squeezebox")
    for line in importlib.metadata.requires("squeezebox") or () if own is not None else ():
        found = re.fullmatch(r"([\w.-]+)>=([\d.]+)", line)
        if found is None:
            continue
        name, least = found.groups()
        package = installed(name)
        if package is None or _release(package.version) < _release(least):
            have = "none is installed" if package is None else f"{package.version} is installed"
            yield EnvironmentFault(
                fault=Fault.BROKEN,
                package="squeezebox",
                subject=name,
                detail=f"Squeezebox needs {least} or newer, and {have}",
            )


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def _notes() -> Iterator[str]:
    has_device = torch.cuda.is_available()
    if _compiler() is None and not has_device:
        yield "squeezebox.compile needs a C++ compiler to compute on a processor: install g++ or clang++."
    if installed("triton") is not None and not has_device:
        yield "triton is installed, but there is no device for its kernels: codecs use the processor's."
    if shutil.which("nvidia-smi") and not has_device:
        yield "there is an NVIDIA driver, but this torch sees no device: is it a build for CUDA?"
