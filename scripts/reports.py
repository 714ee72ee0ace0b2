"""Print which tests keep each public report of a fault from returning.

    python scripts/reports.py

tests/reports.toml lists the reports: users' threads about other libraries, and faults that were
found by trying such reports on this library. A test that covers one is marked with its number,
`@pytest.mark.report("R05")`; where no test does, the list gives the reason.
"""

import ast
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def reports() -> dict[str, dict[str, str]]:
    """Each report's source, title and, where no test covers it, reason, by its number."""
    return tomllib.loads((TESTS / "reports.toml").read_text())


def numbers_of(test: ast.FunctionDef) -> Iterator[str]:
    """The numbers of the reports with which a test is marked."""
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.report":
            yield from (ast.literal_eval(number) for number in mark.args)


def tests_of_reports() -> dict[str, list[str]]:
    """The tests that are marked with each number, as `folder/file.py::test`."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for number in numbers_of(node):
                    found[number].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def main() -> None:
    tests = tests_of_reports()
    for number, report in reports().items():
        print(f"{number}  {report['title']} [{report['source']}]")
        for test in tests[number]:
            print(f"       {test}")
        if "reason" in report:
            reason = textwrap.fill(f"no test: {report['reason']}", 93)
            print(textwrap.indent(reason, " " * 7))
    covered = sum(bool(tests[number]) for number in reports())
    print(f"{covered} of {len(reports())} reports are covered by tests")


if __name__ == "__main__":
    main()
