"""Training and evaluation text cannot leak into each other."""

import pytest

from eval import data


@pytest.fixture(scope="module")
def splits():
    return {s: data.load(["stdlib"], s, default_split=s) for s in ("train", "validation")}


def first_components(corpus):
    return {document.name.split("/")[0] for document in corpus.documents}


def test_stdlib_splits_are_disjoint_and_deterministic(splits):
    train, validation = splits["train"], splits["validation"]
    assert train.documents and validation.documents
    hashes = {d.sha256 for d in train.documents} & {d.sha256 for d in validation.documents}
    assert not hashes and not (first_components(train) & first_components(validation))
    again = data.load(["stdlib"], "train", default_split="train")
    assert again.sha256 == train.sha256


def test_exact_duplicates_are_dropped():
    documents = [data.Document("a.py", "x = 1\n"), data.Document("b.py", "x = 1\n")]
    assert [d.name for d in data.drop_duplicates(documents)] == ["a.py"]


def test_a_planted_leak_is_refused(splits, tmp_path):
    validation = splits["validation"]
    data.write_manifest(tmp_path, splits["train"])
    data.refuse_overlap(validation, data.read_manifest(tmp_path), "clean")
    leaked = data.Corpus(
        **{
            **vars(splits["train"]),
            "documents": splits["train"].documents[:3] + validation.documents[:1],
        }
    )
    data.write_manifest(tmp_path, leaked)
    with pytest.raises(ValueError, match="overlaps the training documents of leaky"):
        data.refuse_overlap(validation, data.read_manifest(tmp_path), "leaky")


def test_windows_score_every_token_but_the_first_once():
    for stride in (4, 3, 1):
        windows = data.windows(11, 4, stride, has_bos=False)
        scored = [p for w in windows for p in range(w.first_target, w.end)]
        assert len(scored) == len(set(scored))
        if stride < 4:
            assert sorted(scored) == list(range(1, 11))


def test_text_files_and_missing_files(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("hello world")
    corpus = data.load([str(path)], None, default_split="validation")
    assert [d.text for d in corpus.documents] == ["hello world"]
    with pytest.raises(ValueError, match="hf_flash_backend: --dataset"):
        data.load([str(tmp_path / "missing.txt")], None, default_split="validation")
