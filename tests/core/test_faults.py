"""The fault matrix names tests that exist, and says why where there are none."""

from __future__ import annotations

import pytest

from tests import faults, hard


@pytest.mark.parametrize("kind", faults.KINDS, ids=lambda kind: kind.text)
def test_every_place_has_tests_or_a_reason(kind):
    without = {place for place in faults.PLACES if not faults.tests_of(kind, place)}
    assert without == set(kind.gaps)


def test_the_tests_exist():
    for kind in faults.KINDS:
        for test in kind.tests:
            if "::" in test:
                file, name = test.split("::")
                assert name in faults.functions(file), test


def test_every_check_is_of_a_kind():
    assert set(hard.CHECKS) == {t for k in faults.KINDS for t in k.tests if "::" not in t}


def test_the_table_is_printed(capsys):
    assert faults.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(kind.text in printed for kind in faults.KINDS)
