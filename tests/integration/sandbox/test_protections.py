"""Removes the protections of the sandbox one by one and repeats the attacks.

Each row is an attack and the protections that stop it. A server with all protections refuses the
attack. With several protections, a server that keeps any one of them still refuses it: each is
sufficient. Without all of them the attack succeeds, so it is real and nothing else stops it. All
servers are real; tests.support.protections removes the protections from their code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.support import hostile_directory
from tests.support import protection_attacks as attacks
from tests.support.barriers import in_private_mounts
from tests.support.client import uri
from tests.support.protections import (
    FIXED_ROOT,
    IN_LAUNCHER,
    IN_SERVER,
    STEPS,
    VERIFIED,
    Scene,
    before_launcher,
    start_without,
)
from tests.support.sandbox import MARKER, NEEDS_ROOT, Scratch

from exec_server.sandbox.runtime import kernel

pytestmark = [pytest.mark.root, NEEDS_ROOT]

# The first version of Landlock that limits signals and abstract sockets.
_SCOPE_VERSION = 6

# Attacks and the protections that stop them; each of several protections is sufficient.
_ROWS: dict[str, tuple[attacks.Attack, str]] = {
    "write outside": (attacks.forge("outside/o.txt"), "read-only tree, Landlock"),
    "write outside by request": (
        attacks.write("outside/o.txt"),
        "read-only tree, path checks, Landlock",
    ),
    "write to the repository": (attacks.forge("ws/.git/config"), "protected names"),
    "forge by rename": (
        attacks.forge("ws/sub/deep/d.txt", "RODEEP", before=attacks.RENAME),
        "pins",
    ),
    "make a missing name": (
        attacks.forge("ws/.codex/a", before="os.mkdir('.codex')"),
        "placeholders",
    ),
    "make a missing name by request": (
        attacks.make_a_missing_name_by_request,
        "missing names, path checks",
    ),
    "read a denied folder": (attacks.by_command("content('sub/s.txt')", "DENYSUB"), "masks"),
    "read a denied folder by request": (
        attacks.read("DENYSUB", "ws/sub/s.txt"),
        "masks, path checks",
    ),
    "read a denied pattern": (
        attacks.by_command("content('sub/a.key')", "GLOB"),
        "search for globs",
    ),
    "read a denied pattern by request": (attacks.read("GLOB", "ws/sub/a.key"), "path checks"),
    "read in a directory of a pattern": (
        attacks.by_command("content('d.key/file')", "GLOB"),
        "directories that match globs",
    ),
    "read in a directory of a pattern by request": (
        attacks.read("GLOB", "ws/d.key/file"),
        "parents that match globs",
    ),
    "read what is not granted": (
        attacks.by_command("content(out + '/o.txt')", "MINW"),
        "empty root",
    ),
    "be granted a link": (attacks.be_granted_a_link, "refusal of writable links"),
    "use a stale worker": (attacks.use_a_stale_worker, "view dependencies, path checks"),
    "use a stale prebuilt sandbox": (attacks.use_a_stale_prebuilt_sandbox, "view dependencies"),
    "swap the workspace": (
        attacks.swap("next"),
        "identity checks of mounts, check after the build",
    ),
    "swap it for a link": (
        attacks.swap("other"),
        "identity checks of mounts, no links, check after the build",
    ),
    "read behind a new link": (attacks.read_behind_a_new_link, "check after the build"),
    "forge behind a lease": (attacks.forge_behind_a_lease, "unreadable pointers refused"),
    "forge behind a null byte": (
        attacks.forge_behind_pointer("gitdir: real\0x"),
        "unclear pointers refused",
    ),
    "forge behind a long pointer": (
        attacks.forge_behind_pointer("gitdir: real" + "\n" * 9999),
        "unclear pointers refused",
    ),
    "forge behind a blank": (
        attacks.forge_behind_pointer("gitdir: real \n", "real "),
        "pointers as git reads them",
    ),
    "read a denied pattern by name": (attacks.read_by_name, "directories passed by name refused"),
    "read a denied pattern beyond the longest path": (
        attacks.read_beyond_the_longest_path,
        "unsearchable directories refused",
    ),
    "stop a start by a lock": (attacks.stop_a_start_by_a_lock, "claims in placeholders"),
    "stop a start by a link": (attacks.stop_a_start_by_a_link, "fixed entries left alone"),
    "leave a placeholder": (attacks.leave_a_placeholder, "rights to remove placeholders"),
    "read the server without a mount table": (
        attacks.read("RO", "/proc/self/environ", MARKER),
        "unknown mounts refused",
    ),
    "read the server": (
        attacks.read("RO", "/proc/self/environ", MARKER),
        "procfs kept from direct reads",
    ),
    "unmount a cover": (
        attacks.forge("ws/.git/config", before=attacks.UNMOUNT),
        "no capabilities, Landlock",
    ),
    "forge by leaving": (attacks.forge_by_leaving, "rule for nesting, Landlock"),
    "read a denied folder by leaving": (
        attacks.read_by_leaving("DENYSUB", "os.rename('sub', 'moved')", "moved/s.txt"),
        "rule for nesting, Landlock",
    ),
    "read a denied pattern by leaving": (
        attacks.read_by_leaving("GLOB", "os.rename('sub/a.key', 'sub/moved')", "sub/moved"),
        "rule for nesting, Landlock",
    ),
    "forge in a closed workspace": (
        attacks.reopen("ws", 0o000, "WW", "os.rename('.git', 'moved')"),
        "closed paths refused, closed directories refused, check after the build",
    ),
    "make a name in a closed workspace": (
        attacks.reopen("ws", 0o500, "WW", "os.mkdir('.codex')"),
        "closed directories refused",
    ),
    "rename in a closed folder": (
        attacks.reopen("ws/sub", 0o000, "RODEEP", "os.rename('sub/deep', 'sub/moved')"),
        "closed paths refused, closed directories refused, check after the build",
    ),
    "forge by a descriptor": (
        attacks.use_descriptor(
            "WWNET", "RONET", "ws", "os.rename('.git', 'moved'); os.mkdir('.git')"
        ),
        "Landlock, rule for unix sockets",
    ),
    "forge hooks by a descriptor": (
        attacks.use_descriptor("HOOKSNET", "WWNET", "ws/.git", "os.rename('hooks', 'moved')"),
        "directory above the root",
    ),
    "reach another command": (
        attacks.reach_another_command,
        "user namespace, private /proc, Landlock, refusal of shared processes",
    ),
    "write to a pipe of the host": (attacks.write_to_a_pipe_of_the_host, "Landlock"),
    "join a user namespace": (attacks.join_a_user_namespace, "user namespace, rule for joining"),
    "read another user's file": (
        attacks.read_another_users_file,
        "user namespace, no capabilities",
    ),
    "become another user": (
        attacks.become_another_user,
        "user namespace, nosuid, no new privileges",
    ),
    "open a device": (attacks.open_a_device, "nodev"),
    "write to a terminal of the host": (
        attacks.write_to_a_terminal_of_the_host,
        "private /dev, nodev",
    ),
    "type into the own terminal": (
        attacks.by_command(attacks.TYPE, tty=True),
        "rule for terminals",
    ),
    "lease a file of the host": (attacks.by_command(attacks.LEASE, "RO"), "rule for leases"),
    "lock a file of the host": (attacks.by_command(attacks.LOCK, "RO"), "rule for locks"),
    "open settings of the kernel": (
        attacks.by_command(attacks.OPEN_SETTINGS),
        "read-only /proc/sys",
    ),
    "read about hardware": (
        attacks.by_command("content('/proc/interrupts')"),
        "hidden parts of /proc",
    ),
    "mount another /proc": (
        attacks.by_command(attacks.MOUNT_PROC, "MINR"),
        "no nesting above the host",
    ),
    "open cgroups": (attacks.by_command(attacks.OPEN_CGROUPS, "RO"), "rule for cgroups"),
    "signal the server": (
        attacks.by_command("os.kill(int(extra[0]), 0)"),
        "pid namespace, Landlock",
    ),
    "see the server": (
        attacks.by_command("content('/proc/%s/cmdline' % extra[0])"),
        "private /proc",
    ),
    "find shared memory": (attacks.find_shared_memory_of_the_host, "ipc namespace"),
    "find a key": (attacks.by_command(attacks.FIND_KEY), "own keyring, rule for keys"),
    "read variables of the init": (
        attacks.by_command(attacks.FIND_VARIABLE),
        "clean environment, hidden memory",
    ),
    "open the memory of the init": (attacks.by_command("opens('/proc/1/mem')"), "hidden memory"),
    "import from the workspace": (hostile_directory.IMPORT, "module path of helpers"),
    "run a program of the workspace": (hostile_directory.RUN_PROGRAM, "programs of the system"),
    "read the log": (attacks.read_the_log, "log left, Landlock"),
    "open the memory of a worker": (attacks.open_the_memory_of_a_worker, "own process of a worker"),
    "use an open descriptor": (
        attacks.by_command(attacks.USE_99),
        "no descriptors for the launcher, descriptors closed, Landlock",
    ),
    "forge certificates": (attacks.forge_certificates, "files of the server read-only"),
    "trust forged certificates": (attacks.trust_forged_certificates, "verified certificates"),
    "trust later certificates": (attacks.trust_later_certificates, "certificates in the view"),
    "open a socket": (attacks.by_command("socket.socket().close()"), "filter"),
    "reach a listener": (attacks.reach_a_listener_of_the_host, "filter, network namespace"),
    "connect to a socket": (attacks.connect_to_a_socket_of_the_host, "rule for connect"),
    "send a datagram to a path": (attacks.send("outside/d.sock"), "rule for sockets"),
    "send it to a name": (
        attacks.send(attacks.ABSTRACT_NAME),
        "rule for sockets, network namespace, Landlock",
    ),
    "use the entry for 32 bits": (
        attacks.by_command(attacks.USE_OLD_ENTRY),
        "rule for architectures",
    ),
}
# More code for the servers of an attack, with and without protections.
_GIVEN = {
    "use a stale prebuilt sandbox": attacks.SIGNALLING,
    "swap the workspace": attacks.SWAPPING,
    "swap it for a link": attacks.SWAPPING,
    "forge in a closed workspace": attacks.LIKE_ORDINARY_USERS,
    "make a name in a closed workspace": attacks.LIKE_ORDINARY_USERS,
    "rename in a closed folder": attacks.LIKE_ORDINARY_USERS,
    "read a denied pattern by name": attacks.LIKE_ORDINARY_USERS,
    "leave a placeholder": attacks.LIKE_ORDINARY_USERS,
    "read behind a new link": attacks.RELINKING,
    "read the server without a mount table": attacks.NO_MOUNT_TABLE,
    "find a key": attacks.WITH_KEY,
    "mount another /proc": before_launcher(FIXED_ROOT),
    "read the log": attacks.LOGGING,
    "use an open descriptor": attacks.LEAVE_OPEN,
}
# Not possible on every machine, even without a sandbox.
_OPTIONAL = {"become another user", "open a device", "type into the own terminal"}
_OPTIONAL |= {"open cgroups", "find a key", "use the entry for 32 bits"}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Scratch]:
    """One tree of root for all servers."""
    with Scratch(0) as tree:
        yield tree


@pytest.fixture(scope="module")
def untouched(scratch: Scratch) -> Iterator[Scene]:
    """A server with all protections."""
    with start_without(scratch) as scene:
        yield scene


@pytest.mark.parametrize("name", _ROWS)
def test_an_attack_succeeds_only_without_its_protections(
    name: str, scratch: Scratch, untouched: Scene
) -> None:
    attack, protections = _ROWS[name][0], _ROWS[name][1].split(", ")
    given = _GIVEN.get(name, "")
    with start_without(scratch, (), given) if given else contextlib.nullcontext(untouched) as scene:
        scratch.reset(STEPS)
        if name in _OPTIONAL and not attack(replace(scene, confined=False)):
            pytest.skip("not possible here even without a sandbox")
        scratch.reset(STEPS)
        assert not attack(scene), "with all protections"
    for kept in protections if len(protections) > 1 else ():
        if kept == "Landlock" and kernel.landlock_version() < _SCOPE_VERSION:
            continue  # on such a kernel Landlock alone is not sufficient
        with start_without(
            scratch, [other for other in protections if other != kept], given
        ) as scene:
            assert not attack(scene), f"with nothing but: {kept}"
    with start_without(scratch, protections, given) as scene:
        assert attack(scene), "without any"


@pytest.mark.quick
@pytest.mark.parametrize(("removed", "is_hit"), [((), False), (("mount table",), True)])
def test_new_mounts_are_missed_only_without_the_mount_table(
    removed: Sequence[str], is_hit: bool
) -> None:
    def attack() -> None:
        with Scratch(0) as tree, start_without(tree, removed) as scene:
            assert attacks.work_below_a_new_mount(scene) == is_hit

    in_private_mounts(attack)


@pytest.mark.parametrize("name", VERIFIED)
def test_nothing_runs_when_a_restriction_has_no_effect(scratch: Scratch, name: str) -> None:
    with start_without(scratch, [name], verified=True) as scene:
        outcome = scene.outcome("WW", "forge('made')")
        assert outcome.refusal is not None
        assert VERIFIED[name] in outcome.refusal.message
        params = {"path": uri(scene.ws / "made"), "sandbox": scene.policy("WW"), "dataBase64": ""}
        assert VERIFIED[name] in scene.client.failure("fs/writeFile", params)[1]
        assert not (scene.ws / "made").exists()


def test_every_protection_has_its_attack() -> None:
    attacked = {name for _, names in _ROWS.values() for name in names.split(", ")} | {"mount table"}
    assert attacked == IN_SERVER.keys() | IN_LAUNCHER.keys()
