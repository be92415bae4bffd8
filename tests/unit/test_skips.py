"""In CI a skipped test fails, unless its reason is on the list."""

import pytest

pytest_plugins = ["pytester"]

GATED = """
from tests.support import skips

def pytest_configure(config):
    if skips.in_ci():
        config.pluginmanager.register(skips.SkipGate())
"""
QUIET = ("-p", "no:cacheprovider", "-p", "no:asyncio")
TESTS = """
import pytest

def test_allowed():
    pytest.skip("no CUDA device on this machine")

def test_missing():
    pytest.skip("no redis-server on the PATH")

@pytest.mark.skipif(True, reason="there is no compiler")
def test_marked():
    pass

def test_module():
    pytest.importorskip("no_such_module_anywhere")

@pytest.fixture
def absent():
    pytest.skip("not here")

def test_fixture(absent):
    pass

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""


@pytest.fixture(autouse=True)
def _own_configuration(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(GATED)


@pytest.mark.parametrize("value", ["true", "1"])
def test_a_skip_in_ci_fails_with_its_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CI", value)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(*QUIET)
    result.assert_outcomes(skipped=1, failed=2, errors=2, xfailed=1)
    result.stdout.fnmatch_lines(["*skipped in CI: no redis-server on the PATH*"])


def test_a_module_skipped_as_a_whole_fails_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile("import pytest\npytest.importorskip('no_such_module_anywhere')\ndef test_it(): pass")
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*skipped in CI: could not import 'no_such_module_anywhere'*"])


def test_elsewhere_skips_are_skips(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess(*QUIET).assert_outcomes(skipped=5, xfailed=1)
