"""Whatever bytes a file has, it is read or refused in words; ``run_files.py`` tries for as long as
you like.
"""

from importlib.util import find_spec

import pytest

from tests.fuzz.run_files import fuzz, readers

HAS_ATHERIS = find_spec("atheris") is not None


@pytest.mark.skipif(not HAS_ATHERIS, reason="needs atheris (extra dev)")
@pytest.mark.parametrize("reader", readers() if HAS_ATHERIS else [""])
@pytest.mark.slow
def test_any_bytes_are_read_or_refused(reader, tmp_path):
    found = fuzz(reader, runs=1500, seconds=None, seed=7, folder=tmp_path)
    assert not found, found
