"""What leads to deploy and what does not, and the arithmetic beside it."""

from __future__ import annotations

import pytest

from octavo.decide.config import QuickstartConfig
from octavo.decide.kv_memory import KVMemory, kv_memory_at_peak
from octavo.decide.narrator import Narrator
from octavo.decide.prefix_trial import Round
from octavo.decide.verdict import Verdict, advise, check_load, check_perplexity, check_size
from octavo.errors import OctavoError, UserError


def test_deploy_takes_every_objective():
    good = (check_size(100, 40), check_perplexity(20, 21, 10, None))
    assert Verdict(good).is_deploy
    assert Verdict(good).headline == "Deploy: every objective holds."
    bad = Verdict((*good, check_load("concurrent load", "chat", {"attainment": 0.5, "met": False}, 10)))
    assert not bad.is_deploy
    assert bad.headline == "Do not deploy: concurrent load missed."


@pytest.mark.parametrize(
    ("after", "interval", "is_met", "note"),
    [
        (21.99, None, True, ""),
        (22.1, None, False, ""),
        (21.0, (4.0, 6.0), True, "within the limit"),
        (21.0, (4.0, 12.0), True, "on both sides of the limit"),
        (23.0, (11.0, 19.0), False, "beyond the limit"),
    ],
)
def test_perplexity_check(after, interval, is_met, note):
    check = check_perplexity(20.0, after, 10.0, interval)
    assert check.is_met == is_met
    assert check.note.endswith(note)


def test_size_check():
    assert check_size(100, 40).measured == "60.0% smaller"
    assert not check_size(100, 100).is_met


def test_an_undecided_load_says_so():
    check = check_load("load", "chat", {"attainment": 1.0, "met": True, "decided": False}, 30)
    assert check.is_met
    assert "30 requests are too few" in check.note
    assert check_load("load", "chat", {"attainment": 1.0, "met": True, "decided": True}, 400).note == ""


def test_advice_is_given_for_what_was_missed():
    checks = (
        check_size(1, 2),
        check_perplexity(20, 40, 10, None),
        check_load("load", "", {"attainment": 1.0, "met": True}, 1),
    )
    assert [line.split(":")[0] for line in advise(checks, "W4A16")] == ["size", "quality"]
    loads = [check_load(name, "", {"attainment": 0.0, "met": False}, 1) for name in ("one load", "another")]
    assert [line.split(":")[0] for line in advise(loads, "W4A16")] == ["one load and another"]


def test_kv_memory_at_the_busiest_moment():
    samples = [
        {"num_requests_running": 0.0, "kv_cache_usage_perc": 0.0},
        {"num_requests_running": 2.0, "kv_cache_usage_perc": 0.012},
        {"num_requests_running": 4.0, "kv_cache_usage_perc": 0.024},
        {"num_requests_running": 3.0, "kv_cache_usage_perc": 0.018},
    ]
    kv = kv_memory_at_peak(samples, num_blocks=1000, block_size=16, bytes_per_token=10, max_model_len=2048)
    assert kv == KVMemory(running=4, blocks=24, block_size=16, bytes_per_token=10, max_model_len=2048)
    assert kv.paged_bytes == 24 * 16 * 10
    assert kv.contiguous_bytes == 4 * 2048 * 10
    assert kv.ratio == pytest.approx(21.33, rel=0.001)


def test_a_load_that_was_never_seen_running_is_an_error():
    with pytest.raises(OctavoError, match="none of 1 looks"):
        kv_memory_at_peak([{"num_requests_running": 0.0, "kv_cache_usage_perc": 0.0}], 10, 16, 1, 10)


def test_hit_rate_is_of_this_round_alone():
    before = {"prefix_cache_queries_total": 100.0, "prefix_cache_hits_total": 90.0}
    after = {"prefix_cache_queries_total": 300.0, "prefix_cache_hits_total": 140.0}
    entry = Round("r", 1.0, before, after, [], [])
    assert entry.hit_rate == 0.25
    assert Round("r", 1.0, before, before, [], []).hit_rate == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("streams", 0), ("load_seconds", 0), ("load_seconds", float("inf")), ("max_perplexity_increase", -1)],
)
def test_settings_are_checked(field, value):
    with pytest.raises(UserError, match=field):
        QuickstartConfig(**{field: value})


@pytest.mark.parametrize(("after", "lead"), [(40, "go on with: "), (100, "to find what would hold: ")])
def test_the_last_line_does_not_deploy_what_the_verdict_refused(after, lead, tmp_path, capsys):
    verdict = Verdict((check_size(100, after),))
    Narrator(num_stages=1).verdict(verdict, tmp_path / "report.html", 1.0, "octavo serve model")
    assert capsys.readouterr().out.splitlines()[-1] == f"{lead}octavo serve model"
