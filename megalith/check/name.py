"""The rule about the run's name."""

from megalith.check.case import Case, Found, error


def name_is_a_folder(case: Case) -> Found:
    """The run's folder is runs/NAME, so its name is that of one folder there, and of no other place."""
    name = case.spec.name
    if name.strip() not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\"):
        return
    reason = "is not a name for a folder, and the run is kept in runs/NAME"
    yield error("name", name, reason, 'Leave out slashes, such as "first". --run-dir keeps a run anywhere else.')
