"""The jobs and supervisors of the tests of `fleet`, for those of the loop that controls them."""

from tests.fleet.conftest import job, supervise  # noqa: F401  # fixtures
