"""The run's name, which is that of its folder."""

import pytest

from tests.check.runs import errors, is_named


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/x", "a/b", "..", ".", " ", "two\\nlines"])
def test_a_name_that_leads_out_of_the_folder_of_runs_is_refused(name: str):
    is_named([f'name = "{name}"'], "name", "--run-dir keeps a run in any other folder")


@pytest.mark.parametrize("name", ["llama3.1-8b", "first try", "été", "..."])
def test_any_other_name_is_let_be(name: str):
    assert errors(f'name = "{name}"') == []
