"""Every public report of a fault has a test, or a reason why it has none."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "reports.py"


def script():
    spec = importlib.util.spec_from_file_location("reports", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_report_has_either_a_test_or_a_reason():
    found = script()
    tests = found.tests_of_reports()
    both_or_neither = [
        number
        for number, report in found.reports().items()
        if bool(tests[number]) == bool(report.get("reason"))
    ]
    assert both_or_neither == []


def test_no_test_names_an_unknown_report():
    found = script()
    assert set(found.tests_of_reports()) <= set(found.reports())


def test_each_report_has_a_source_and_a_title_of_one_sentence():
    for number, report in script().reports().items():
        assert report["source"] and report["title"].endswith("."), number
        assert set(report) <= {"source", "title", "reason"}, number
