from megalith.fleet.exit_codes import MEANINGS, ORDERLY, ExitCode, retryable


def test_every_code_has_a_meaning():
    assert set(MEANINGS) == set(ExitCode)


def test_stopped_and_lost_runs_may_be_retried_and_errors_not():
    assert {code for code in ExitCode if retryable(code)} == {
        ExitCode.LOST,
        ExitCode.STOPPED,
        ExitCode.REPORTED,
        ExitCode.INTERRUPTED,
        ExitCode.TERMINATED,
    }
    assert not retryable(41)


def test_an_orderly_end_is_finished_or_stopped():
    assert {int(code) for code in ORDERLY} == {0, 75}
