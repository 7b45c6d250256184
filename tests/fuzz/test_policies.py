"""On any tree, any policy gives a view that matches the rules, or is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.layout_model import Content, Model, Refused, Simulation, Tree, child

from exec_server.protocol import sandbox as wire
from exec_server.sandbox.policy.access import explain_denial, policy_access
from exec_server.sandbox.policy.compiler import HostPaths, compile_policy
from exec_server.sandbox.policy.layout import Unenforceable, lay_out
from exec_server.sandbox.policy.model import Policy, View

Claims = Sequence[tuple[str, wire.Access]]

# Few names, so that rules, links and entries coincide often.
_NAMES = st.sampled_from(["a", "b", "c", ".git", ".codex"])
_PATHS = st.lists(_NAMES, max_size=4).map(lambda names: "/" + "/".join(names))
_TARGETS = _PATHS | st.lists(_NAMES | st.just(".."), min_size=1, max_size=3).map("/".join)
_POINTERS = _TARGETS.map(lambda target: f"gitdir: {target}\n".encode())
_CONTENTS: st.SearchStrategy[Content] = st.one_of(
    st.none(), st.none(), st.none(), _TARGETS, _POINTERS, st.just(b"text")
)
_ENTRIES = st.lists(st.tuples(_PATHS, _CONTENTS), max_size=14)
_ACCESSES = st.sampled_from(["read", "write", "write", "deny"])
_CLAIMS = st.lists(st.tuples(_PATHS, _ACCESSES), max_size=6)
_ROOT = st.sampled_from([[], [("/", "read")], [("/", "read")], [("/", "write")]])
_POLICIES = st.builds(lambda root, claims: root + claims, _ROOT, _CLAIMS)
_NOWHERE = HostPaths(tmpdir=None, minimal=(), slash_tmp=False, cwd=None)


def _policy(claims: Claims) -> Policy:
    entries = [
        wire.PolicyEntry(
            path=wire.ExactPath(wire.FileUri.from_wire("file://" + path)), access=access
        )
        for path, access in claims
    ]
    sandbox = wire.Sandbox(
        permissions=wire.Managed(wire.Restricted(entries), "restricted"),
        windows_sandbox_level="disabled",
    )
    policy = compile_policy(sandbox, _NOWHERE, for_process=False)
    assert policy is not None
    return policy


def _laid_out(claims: Claims, tree: Tree) -> View | None:
    policy = _policy(claims)
    assume(policy.rules is not None)
    try:
        return lay_out(policy, tree)
    except Unenforceable:
        return None


@given(_POLICIES, _PATHS)
def test_access_is_what_the_deepest_rule_says(claims: Claims, path: str) -> None:
    policy = _policy(claims)
    everything = Tree((where, None) for where in [path, *(where for where, _ in claims)])
    lexical = Model(claims, everything, protects=False)
    assert policy_access(policy, path) == lexical.verdict(path)


@given(_POLICIES, _PATHS)
def test_an_explanation_is_given_exactly_for_what_is_denied(claims: Claims, path: str) -> None:
    policy = _policy(claims)
    assume(policy.rules is not None)
    everything = Tree((where, None) for where in [path, *(where for where, _ in claims)])
    model = Model(claims, everything)
    assert (explain_denial(policy, path, "read") is None) == model.may_read(path)
    assert (explain_denial(policy, path, "write") is None) == model.may_write(path)


@settings(max_examples=examples(400))
@given(_POLICIES, _ENTRIES)
def test_the_view_allows_what_the_rules_allow(
    claims: Claims, entries: list[tuple[str, Content]]
) -> None:
    tree = Tree(entries)
    view = _laid_out(claims, tree)
    if view is None:
        with pytest.raises(Refused):
            Model(claims, tree)
        return
    model, inside = Model(claims, tree), Simulation(view, tree)
    assert view.is_empty == (not model.reads_root())
    for path, content in tree.entries.items():
        assert inside.may_read(path) == model.may_read(path), path
        assert inside.may_write(path) == model.may_write(path), path
        assert inside.may_rename(path) == model.may_rename(path), path
        if content is None:
            for name in ("a", "b", "c", ".git", ".codex", ".aws"):
                new = child(path, name)
                if new not in tree.entries:
                    assert inside.may_create(new) == model.may_create(new), new


@settings(max_examples=examples(300))
@given(_POLICIES, _ENTRIES)
def test_mounts_are_of_what_is_there_and_parents_come_first(
    claims: Claims, entries: list[tuple[str, Content]]
) -> None:
    tree = Tree(entries)
    view = _laid_out(claims, tree)
    assume(view is not None)
    assert view is not None
    done: list[str] = []
    for step in view.steps:
        node = tree.status(step.path)
        assert node is not None
        assert node.kind != "link"
        assert (step.device, step.inode) == (node.device, node.inode)
        assert step.is_directory == (node.kind == "directory")
        assert not any(path.startswith(step.path + "/") or path == step.path for path in done)
        done.append(step.path)
    # The directory of a name that must stay missing is a mount itself.
    assert {name.path for name in view.missing} <= set(done)
    assert all(tree.holds(dependency) for dependency in view.dependencies)


@settings(max_examples=examples(300))
@given(_POLICIES, _ENTRIES)
def test_granted_paths_work_inside_an_empty_root(
    claims: Claims, entries: list[tuple[str, Content]]
) -> None:
    tree = Tree(entries)
    view = _laid_out(claims, tree)
    assume(view is not None and view.is_empty)
    assert view is not None
    inside = Simulation(view, tree)
    for path, _ in claims:
        place, absent, links = tree.follow(path)
        # A link that is denied, or may be replaced, is not followed.
        if absent or not inside.may_read(place) or any(inside.may_write(link) for link in links):
            continue
        if any(inside.state(link) == "mask" for link in links):
            continue
        # A link in a granted directory is the host's, and its `..` may refer to missing parents.
        if any(inside.may_read(link) and ".." in tree.link_target(link) for link in links):
            continue
        assert inside.reaches(path) == place


@settings(max_examples=examples(400))
@given(
    _POLICIES,
    _ENTRIES,
    st.lists(st.tuples(st.integers(0, 99), st.booleans(), _CONTENTS), min_size=1, max_size=2),
)
def test_while_the_dependencies_hold_the_view_is_current(
    claims: Claims, entries: list[tuple[str, Content]], changes: list[tuple[int, bool, Content]]
) -> None:
    tree = Tree(entries)
    view = _laid_out(claims, tree)
    assume(view is not None)
    assert view is not None
    later = tree.copy()
    places = sorted({*tree.entries, *(path for path, _ in claims)} - {"/"})
    for number, remakes, content in changes if places else ():
        path = places[number % len(places)]
        later.remove(path)
        if remakes:
            later.put(path, content)
    if all(later.holds(dependency) for dependency in view.dependencies):
        now = _laid_out(claims, later)
        assert now is not None
        assert (now.steps, now.links, now.missing) == (view.steps, view.links, view.missing)
