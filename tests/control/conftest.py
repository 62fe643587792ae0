"""The jobs and supervisors of the tests of `fleet`, also for the tests of the control loop."""

from tests.fleet.conftest import job, supervise  # noqa: F401  # fixtures
