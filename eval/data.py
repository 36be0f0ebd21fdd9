"""Texts to train and evaluate on: documents, their hashes, disjoint splits, token streams and
windows.

A dataset is named by `stdlib` (the Python standard library's sources, always at hand), by text
files, or by a Hub dataset `id[:config]`. Documents are hashed (sha256 of the text with trailing
white space removed); a model trained here carries the hashes of its training documents, and
`refuse_overlap` keeps them out of any evaluation.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

JOIN = "\n\n"
JOIN_RULE = "documents joined by a blank line, tokenised as one text, no special tokens"
MANIFEST = "train_manifest.json"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_SHARE = 10  # one first path component in so many is validation


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Hash of the text up to trailing white space and line ends, so that such a copy still
        counts as one.
        """
        normal = "\n".join(line.rstrip() for line in self.text.strip().splitlines())
        return hashlib.sha256(normal.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Corpus:
    name: str
    split: str
    documents: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        joined = JOIN.join(document.text for document in self.documents)
        return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()


def drop_duplicates(documents: Iterable[Document]) -> list[Document]:
    """The documents without empty ones and without repeats of an earlier one (by hash)."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        if document.text.strip() and document.sha256 not in seen:
            seen.add(document.sha256)
            kept.append(document)
    return kept


def split_of(name: str) -> str:
    """ "train" or "validation" by a hash of the first path component, so that a package is never
    divided.
    """
    component = name.split("/", 1)[0].removesuffix(".py")
    number = int.from_bytes(hashlib.sha256(component.encode()).digest()[:8], "big")
    return "validation" if number % VALIDATION_SHARE == 0 else "train"


def _stdlib_files(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts[:-1]):
            try:
                yield Document(name.as_posix(), path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:  # a handful of files in a legacy encoding
                continue


def load(names: Sequence[str], split: str | None, *, default_split: str) -> Corpus:
    """The corpus of `--dataset names`, duplicates dropped, in a fixed order.

    Args:
        names: ["stdlib"], one Hub id `id[:config]`, or one or more text files.
        split: a split's name, or None for `default_split`; text files have no splits.

    Raises: ValueError for a split that does not exist or a dataset that has no text.
    """
    if list(names) == ["stdlib"]:
        split = split or default_split
        if split not in ("train", "validation"):
            raise ValueError(
                f"hf_flash_backend: --split does not exist in stdlib: got {split!r}, "
                f"expected 'train' or 'validation'."
            )
        root = Path(sysconfig.get_paths()["stdlib"])
        # Duplicates go before the split: a text that occurs twice must not end up on both sides.
        documents = [d for d in drop_duplicates(_stdlib_files(root)) if split_of(d.name) == split]
        name = f"stdlib-{platform.python_version()}"
    elif all(Path(path).is_file() for path in names):
        if split is not None:
            raise ValueError(
                f"hf_flash_backend: --split does not apply to text files: got {split!r}, "
                f"expected none. Name the files of the split instead."
            )
        split = "files"
        documents = drop_duplicates(
            Document(Path(path).name, Path(path).read_text(encoding="utf-8")) for path in names
        )
        name = "+".join(Path(path).name for path in names)
    elif len(names) == 1:
        name = names[0]
        split = split or ("test" if default_split == "validation" else default_split)
        documents = [Document(f"{name}[{i}]", text) for i, text in enumerate(_hub(name, split))]
    else:
        missing = [path for path in names if not Path(path).is_file()]
        raise ValueError(
            f"hf_flash_backend: --dataset names files that do not exist: got {missing}, expected "
            f"'stdlib', one Hub dataset id, or text files."
        )
    if not any(document.text.strip() for document in documents):
        raise ValueError(
            f"hf_flash_backend: --dataset holds no text: got {name!r} split {split!r}, "
            f"expected at least one non-empty document."
        )
    return Corpus(name, split, tuple(documents))


def _hub(name: str, split: str) -> list[str]:
    """The `text` column, every row, empty ones too: published figures are of all rows joined by a
    blank line.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"hf_flash_backend: --dataset is no text file and would come from the Hub: got {name!r}, "
            f"expected the package datasets to be installed. Install it (pip install datasets)."
        ) from error
    identity, _, config = name.partition(":")
    try:
        rows = load_dataset(identity, config or None, split=split)
    except (OSError, ValueError) as error:  # no such file, id, config or split, or no network
        raise ValueError(
            f"hf_flash_backend: --dataset cannot be loaded: got {name!r} split {split!r}, expected "
            f"'stdlib', text files that exist, or a Hub dataset id. {type(error).__name__}: {error}"
        ) from error
    if "text" not in rows.column_names:
        raise ValueError(
            f"hf_flash_backend: --dataset has no text column: got columns {rows.column_names}, "
            f"expected 'text'."
        )
    return rows["text"]


def write_manifest(folder: Path, corpus: Corpus, inherited: dict[str, Any] | None = None) -> None:
    """Writes the hashes of the training documents beside the model, with those of the model it
    started from.
    """
    hashes = {d.sha256 for d in corpus.documents if d.text.strip()}
    hashes.update(inherited["sha256"] if inherited else ())
    manifest = {
        "schema": 1,
        "dataset": corpus.name,
        "split": corpus.split,
        "sha256": sorted(hashes),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=0) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a model folder; None for a model not trained here (a Hub id, a converted
    file).
    """
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def refuse_overlap(corpus: Corpus, manifest: dict[str, Any] | None, model: str) -> None:
    """Raises ValueError if a document of the corpus is among the model's training documents."""
    if manifest is None:
        return
    trained = set(manifest["sha256"])
    leaked = [document.name for document in corpus.documents if document.sha256 in trained]
    if leaked:
        raise ValueError(
            f"hf_flash_backend: --dataset overlaps the training documents of {model}: got {len(leaked)} "
            f"of {len(corpus.documents)} documents of {corpus.name} {corpus.split} (first: {leaked[0]}), "
            f"expected none. Evaluate on a split the model was not trained on."
        )


def token_stream(corpus: Corpus, tokenizer: Any, limit: int | None) -> np.ndarray:
    """The corpus as one stream of token ids [tokens] int64 by JOIN_RULE, cut to `limit` tokens if
    given.

    Only as many whole documents as the limit needs are tokenised.
    """
    texts = [document.text for document in corpus.documents]
    characters = sum(len(text) + len(JOIN) for text in texts)
    budget = characters if limit is None else 8 * limit
    while True:
        used, count = [], 0
        for text in texts:
            if count >= budget:
                break
            used.append(text)
            count += len(text) + len(JOIN)
        ids = tokenizer(JOIN.join(used), add_special_tokens=False, verbose=False)["input_ids"]
        if len(used) == len(texts) or (limit is not None and len(ids) >= limit):
            return np.asarray(ids[:limit], dtype=np.int64)
        budget *= 2


def default_bos(tokenizer: Any) -> int | None:
    """The token put before every window: the tokenizer's BOS if it adds one by itself, else none."""
    ids = tokenizer("a")["input_ids"]
    bos = tokenizer.bos_token_id
    return bos if bos is not None and ids and ids[0] == bos else None


@dataclass(frozen=True)
class Window:
    """Stream positions [begin, end) are fed to the model; positions [first_target, end) are scored."""

    begin: int
    end: int
    first_target: int


def windows(tokens: int, context: int, stride: int, *, has_bos: bool) -> list[Window]:
    """Windows over a stream of `tokens` tokens; no position is scored twice.

    A window feeds at most `context` tokens, BOS included, and the next begins `stride` positions
    later. Without BOS a window's first token has nothing before it and is scored only by an earlier
    window that overlaps (stride < context): the first window has context - 1 targets, later ones
    `stride` (context - 1 if stride equals context).
    """
    length = context - has_bos
    if not 1 <= stride <= length:
        raise ValueError(
            f"hf_flash_backend: --stride is out of range: got {stride}, expected 1 to {length} "
            f"(context {context}{', one of it BOS' if has_bos else ''})."
        )
    result: list[Window] = []
    scored = 0
    for begin in range(0, tokens, stride):
        end = min(begin + length, tokens)
        first_target = max(scored, begin + (not has_bos))
        if first_target < end:
            result.append(Window(begin, end, first_target))
        scored = end
        if end == tokens:
            break
    return result
