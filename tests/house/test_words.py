"""Words are plain: what the package says to a reader names who does what, in the words of the glossary."""

import ast
import io
import re
import runpy
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [path for folder in ("src/squeezebox", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [path for folder in ("docs", "examples") for path in sorted((ROOT / folder).rglob("*.md"))]
PAGES += [path for kind in ("html", "js") for path in sorted((ROOT / "src/squeezebox").rglob(f"*.{kind}"))]
INSTEAD = {
    r"foret(?:ell|old)\w*": "predict, predicted",
    r"in vain": "needlessly; say what is not needed",
    r"ma(?:ke|kes|de|king)(?: \w+)? again": "recompute a tensor, regenerate noise; else write, build again",
    r"anew": "again",
    r"told|tells? (?:\w+ )?apart": "say who passes what to whom, or who distinguishes what",
    r"whoever": "name who it is",
    r"beside": "next to, with, in addition to",
    r"for ever": "without end",
    r"wherein|thereof|therein|thereby|whence|lest": "in which, of it, so that",
    r"so many": "give the number its name",
    r"nought": "zero, nothing",
    r"of which [^.]*of which": "one relative clause a sentence",
}
BANNED = {
    re.compile(rf"\b(?:{words})\b".replace(" ", r"[\s#]+"), flags=re.I): use for words, use in INSTEAD.items()
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """A page; or the strings of a Python file and its blocks of comments; each with its first line."""
    source = path.read_text()
    if path.suffix != ".py":
        yield 1, source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    blocks: dict[int, int] = {}  # a comment's line, and where its block begins
    for line in comments:
        blocks[line] = blocks.get(line - 1, line)
    for start in set(blocks.values()):
        yield start, "\n".join(text for line, text in comments.items() if blocks[line] == start)


def hits(path: Path) -> Iterator[str]:
    for line, text in texts(path):
        for words, instead in BANNED.items():
            for hit in words.finditer(text):
                at = line + text.count("\n", 0, hit.start())
                yield f"{path.relative_to(ROOT)}:{at}: {hit[0]!r}; write: {instead}"


@pytest.mark.parametrize("room", sorted({str(path.parent.relative_to(ROOT)) for path in (*PYTHON, *PAGES)}))
def test_words_are_plain(room):
    found = [hit for path in (*PYTHON, *PAGES) if path.parent == ROOT / room for hit in hits(path)]
    assert not found, "\n" + "\n".join(sorted(found))


def test_sentences_of_pages_are_short():
    house = runpy.run_path(str(ROOT / "scripts" / "house"))
    found = {path: [*house["sentences"](path.read_text())] for path in house["pages"]()}
    long = [
        f"{path.relative_to(ROOT)}:{line}: {count} words"
        for path, sentences in found.items()
        for count, line in sentences
        if count > 40
    ]
    assert not long, "one thought a sentence, at most 25 words:\n" + "\n".join(long)
    counts = sorted(count for sentences in found.values() for count, _ in sentences)
    assert statistics.median(counts) <= 18
    assert counts[len(counts) * 9 // 10] <= 30
