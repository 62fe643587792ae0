"""Make the jobs and supervisors of the `fleet` tests available to the tests of the control loop."""

from tests.fleet.conftest import job, supervise  # noqa: F401  # fixtures
