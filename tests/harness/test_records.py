"""Records hold the schema, and the tables in Markdown are those of the records."""

import json

import pytest

from eval import records, report

BEGIN, END = "<!-- eval:begin perplexity -->\n", "<!-- eval:end perplexity -->\n"


@pytest.fixture
def committed():
    return records.read()


def test_committed_records_are_valid_and_clean(committed):
    assert committed and not any(record["dirty"] for record in committed)
    text = json.dumps(committed)
    assert "/root/" not in text and "/home/" not in text and "/work/" not in text


def test_round_trip(committed, tmp_path):
    path = tmp_path / "perplexity.jsonl"
    records.append(path, committed[:2])
    records.append(path, committed[2:3])
    assert records.read(tmp_path) == committed[:3]


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"value": "fast"}, {"extra": 1}, {"machine": {}}, {"verified": None}]
)
def test_broken_records_are_refused(committed, tmp_path, change):
    with pytest.raises(ValueError, match="hf_flash_backend: record"):
        records.append(tmp_path / "x.jsonl", [{**committed[0], **change}])
    assert not (tmp_path / "x.jsonl").exists()


def test_dirty_records_never_reach_a_table(committed):
    dirty = [{**record, "dirty": True} for record in committed]
    assert report.NOTHING in report.render(BEGIN + END, dirty)
    assert "hf_fused" in report.render(BEGIN + END, committed)


def test_check_notices_a_stale_file(committed, tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Title\n" + BEGIN + "old\n" + END)
    assert report.update([path], committed, check=True) == [path]
    assert "old" in path.read_text()
    assert report.update([path], committed, check=False) == [path]
    assert report.update([path], committed, check=True) == []


def test_an_unclosed_marker_is_an_error(committed):
    with pytest.raises(ValueError, match="is not closed"):
        report.render(BEGIN, committed)


def test_readme_is_fresh(committed):
    assert report.update([records.ROOT / "README.md"], committed, check=True) == []
