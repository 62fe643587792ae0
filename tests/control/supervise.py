"""A supervisor in a process of its own, for tests that signal or kill it: `python -m tests.control.supervise JOB_JSON`."""

import json
import sys
from pathlib import Path

from megalith.control.supervisor import Job, run


def main() -> None:
    fields = json.loads(sys.argv[1])
    outcome = run(Job(**fields | {"run_dir": Path(fields["run_dir"])}))
    print(outcome.message())
    raise SystemExit(outcome.code)


if __name__ == "__main__":
    main()
