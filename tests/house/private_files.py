"""An import-linter contract: a room's ``_name`` modules are imported by that room only."""

import grimp
from importlinter import Contract, ContractCheck, fields, output


class PrivateFiles(Contract):
    """``<root>.<room>.…._name…`` may be imported by ``<root>.<room>`` and what is below it."""

    root = fields.StringField()

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        illegal = sorted(
            (importer, imported)
            for imported in graph.modules
            if imported.startswith(f"{self.root}.") and is_private(imported)
            for importer in graph.find_modules_that_directly_import(imported)
            if room_of(importer) != room_of(imported)
        )
        return ContractCheck(kept=not illegal, metadata={"illegal": illegal})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["illegal"]:
            output.print_error(f"{importer} imports {imported}; import from {room_of(imported)} instead.")
            output.new_line()


def is_private(module: str) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in module.split("."))


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])
