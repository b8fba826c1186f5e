"""What `make flaky` says of repeated runs."""

from __future__ import annotations

from scripts.flaky import summary

PASSED, SKIPPED, FAILED = "", "<skipped/>", '<failure message="weights differ"/>'


def write(folder, **outcomes):
    folder.mkdir()
    cases = "".join(f'<testcase classname="tests" name="{name}">{text}</testcase>' for name, text in outcomes.items())
    (folder / "on-newest.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")


def test_tests_that_differ_are_listed_and_others_are_not(tmp_path):
    folders = [tmp_path / "1", tmp_path / "2"]
    write(folders[0], always=PASSED, once=FAILED, twice=FAILED, skipped=SKIPPED, gone=PASSED)
    write(folders[1], always=PASSED, once=PASSED, twice=FAILED, skipped=PASSED)
    once, twice, skipped, gone = summary(folders, ["on-newest"])
    assert "tests::once: failed 1 of 2 times" in once
    assert "failure: weights differ" in once
    assert "tests::twice: failed 2 of 2 times" in twice
    assert "tests::skipped: skipped, passed in 2 runs" in skipped
    assert "tests::gone: passed in 2 runs" in gone
    assert summary(folders[:1], ["on-cuda"]) == [f"{folders[0] / 'on-cuda.xml'}: missing, so pytest did not end"]
