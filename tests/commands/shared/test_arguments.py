"""Unknown values of options."""

from tests.commands.calling import call


def test_a_format_that_is_not_known_is_a_usage_error():
    assert call("export", "runs/first", "--to", "gguf", "--out", "x").exit_code == 2
    assert call("import", "folder", "--from", "gguf", "--out", "x").exit_code == 2
