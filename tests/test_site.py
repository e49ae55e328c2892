"""The documentation site links its repository (``docs/_site.py``)."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HOOKS = Path(__file__).parents[1] / "docs" / "_site.py"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", HOOKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("origin", "page"),
    [
        ("https://host.org/owner/name", "https://host.org/owner/name"),
        ("https://user:secret@host.org/owner/name.git", "https://host.org/owner/name"),
        ("git@host.org:owner/name.git", "https://host.org/owner/name"),
        ("ssh://git@host.org:22/group/owner/name", "https://host.org/group/owner/name"),
        ("/home/me/some.d/name", ""),
        ("../some.d/name", ""),
        ("some.d/name", ""),
        ("file:///home/name", ""),
        ("", ""),
    ],
)
def test_the_page_of_a_remote(hooks: ModuleType, origin: str, page: str) -> None:
    assert hooks.repository_url(origin) == page
