"""The rule about the run's name."""

from megalith.check.case import Case, Found, error


def name_is_a_folder(case: Case) -> Found:
    """The run's folder is runs/NAME, so NAME must be the name of a single folder."""
    name = case.spec.name
    if name.strip() not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\"):
        return
    reason = "cannot be the name of a folder, but the run is kept in runs/NAME"
    yield error("name", name, reason, 'Use a name without slashes, such as "first". --run-dir keeps a run in any other folder.')
