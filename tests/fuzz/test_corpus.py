"""The kept inputs break no rule, and the tools of `make fuzz` work."""

from __future__ import annotations

from random import Random

import pytest
from tests.fuzz import engine, novelty
from tests.fuzz.grammar import Grammar, all_calls
from tests.fuzz.mutation import MAX_BYTES, mutate, mutate_json
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

from exec_server.server.methods import load_all


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_kept_inputs_break_no_rule(target: Target) -> None:
    reasons = {data: engine.check(target, data) for data in engine.kept_inputs(target)}
    assert {data: reason for data, reason in reasons.items() if reason} == {}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutations_of_kept_inputs_break_no_rule(target: Target) -> None:
    random = Random(0)
    inputs = engine.kept_inputs(target)
    change = mutate_json if target.is_json else mutate
    for _ in range(40):
        data = change(random.choice(inputs), random, inputs, target.words)
        assert engine.check(target, data) is None, data


def test_an_exception_is_a_finding() -> None:
    def fail(data: bytes) -> None:
        if b"bad" in data:
            raise KeyError(data)

    run = engine.fuzz(Target("x", fail, (b"good",), (b"bad",)), [b"good"], Random(1), 60.0)
    (finding,) = run.findings
    assert b"bad" in finding.data
    assert "KeyError" in finding.text


def test_work_above_the_bound_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WORK_SECONDS", 0.0)
    reason = engine.check(Target("x", lambda data: None, ()), b"input")
    assert reason is not None
    assert "processor time for 5 bytes" in reason


def test_new_lines_are_counted_once() -> None:
    (target,) = (each for each in TARGETS if each.name == "globs")
    with novelty.counting() as count:
        first = count(lambda: target.check(b"a*[b]\nx"))
        again = count(lambda: target.check(b"a*[b]\nx"))
    assert again <= first


def test_the_same_random_gives_the_same_inputs() -> None:
    def inputs(seed: int) -> list[bytes]:
        random = Random(seed)
        return [mutate(b"seed input", random, [b"other"], [b"word"]) for _ in range(50)]

    assert inputs(3) == inputs(3) != inputs(4)
    assert max(map(len, inputs(3))) <= MAX_BYTES


def test_the_grammar_knows_every_method() -> None:
    assert set(all_calls()) == set(load_all())


def test_the_grammar_stays_in_its_folder() -> None:
    grammar = Grammar(all_calls(), "file:///scratch", "http://x", is_confined=True)
    assert grammar.is_harmless({"path": "file:///scratch/a", "argv": ["sh", "-c", "echo /"]})
    for path in ("file:///", "/", "file:///scratch/../x", "/scratch/%2E./x", "file:///scratchy"):
        assert not grammar.is_harmless({"path": path})
        assert not grammar.is_harmless([{path: 1}])
    random = Random(5)
    for _ in range(500):
        name, params = grammar.request(random)
        assert name in load_all()
        assert grammar.is_harmless(params)
