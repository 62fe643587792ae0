from megalith.data.progress import bars


def test_bars_count_on_the_error_stream_and_only_when_shown(capsys):
    for shown in (False, True):
        with bars(shown) as made:
            bar = made.start("reading", total=1000)
            made.advance(bar, 400)
            made.finish(bar)
            made.finish(made.start("of unknown length", total=None))
            made.say("[all] done")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("[all] done" in captured.err) == ("reading" in captured.err) == shown
