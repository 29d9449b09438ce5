"""The folder of snapshots: what is kept, dropped, damaged, and never lost in silence."""

import errno
import fcntl
import os
import pkgutil
import threading
from pathlib import Path

import pytest
import tensorferry
import tensorferry.snapshot
from snapshotting import Run, assert_same_bits, links, make, nvme, path, seed_all
from warm_python import WARM_PYTHON

__all__ = ["make", "nvme", "path"]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_keep_drops_older_snapshots_and_their_files(make, path, nvme):
    run = make("weights")
    for _ in range(5):
        run.step()
        run.take(path, keep=2)
    assert [one.number for one in tensorferry.snapshot.find(path)] == [4, 5]
    assert len(list(path.iterdir())) == 2
    assert len(links(nvme)) == 4  # of the weights and of the states, twice
    stats = run.optimizer.stats()
    assert stats["snapshots"] == 2
    for _ in range(10):
        run.step()
        run.take(path, keep=2)
    assert run.optimizer.stats()["file_bytes"] == stats["file_bytes"]


def test_a_dropped_snapshot_leaves_nothing_behind(make, path, nvme):
    run = make()
    run.step()
    for name in ("a", "b"):
        run.take(path, name=name)
        run.step()
    tensorferry.snapshot.drop(path, "a")
    assert [one.name for one in tensorferry.snapshot.find(path)] == ["b"]
    with pytest.raises(tensorferry.snapshot.Unusable, match="has no snapshot 'a': it has b"):
        tensorferry.snapshot.drop(path, "a")
    tensorferry.snapshot.drop(path, "b")
    assert links(nvme) == [] and list(path.iterdir()) == []
    assert run.optimizer.stats()["snapshots"] == 2
    run.take(path)  # sees that the others are gone
    assert run.optimizer.stats()["snapshots"] == 1


def test_space_of_a_dropped_snapshot_of_an_ended_run_is_freed(make, path, nvme):
    run = make()
    for name in ("a", "b"):
        run.step()
        run.take(path, name=name)
    run.close()
    before = sum(os.stat(file).st_blocks for file in nvme.rglob("*.0"))
    tensorferry.snapshot.drop(path, "a")
    after = sum(os.stat(file).st_blocks for file in nvme.rglob("*.0"))
    assert after < before / 2  # also what the run had besides
    last = make()
    last.resume(path)
    tensorferry.snapshot.verify(path)


def test_a_damaged_manifest_is_refused(make, path):
    run = make()
    run.step()
    taken = run.take(path)
    manifest = Path(taken.path) / "rank-0.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"states/0",', '"states/1",', 1))
    with pytest.raises(tensorferry.snapshot.Unusable, match="its checksum is wrong"):
        run.resume(path)
    manifest.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(tensorferry.snapshot.Unusable, match="has format 2, .* reads 1"):
        run.resume(path)


def test_a_snapshot_that_another_process_reads_is_not_dropped(make, path):
    run = make()
    run.step()
    taken = run.take(path, name="read")
    reader = """
    import sys
    from tensorferry.snapshot import folder
    with folder.in_use(folder.find(folder.Path(sys.argv[1]))[0]):
        print("ready", flush=True)
        sys.stdin.read()
    """
    import subprocess
    import textwrap

    with subprocess.Popen(
        [*WARM_PYTHON, "-c", textwrap.dedent(reader), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        with pytest.raises(OSError, match="is reading this snapshot"):
            tensorferry.snapshot.drop(path, "read")
        run.step()
        run.take(path, keep=1)
        assert taken in tensorferry.snapshot.find(path)
    run.take(path, keep=1)
    assert len(tensorferry.snapshot.find(path)) == 1


def test_only_what_a_snapshot_made_is_ever_removed(make, path, tmp_path):
    foreign = ["ranks/rank-0.log", "ranks/rank-0.pt", "named/.rank-1.swp", "a-file"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = make()
    run.step()
    (elsewhere / "left").mkdir()
    run.take(elsewhere, name="killed")
    (elsewhere / "killed" / "commit.json").unlink()
    kept = sorted(file.name for file in (elsewhere / "killed").iterdir())
    for name in foreign:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("mine")
    (path / "empty").mkdir()
    (path / "linked").symlink_to(elsewhere / "killed", target_is_directory=True)
    taken = [Path(run.take(path, keep=1).path)]
    (taken[0] / "notes.txt").write_text("mine")
    taken.append(Path(run.take(path, keep=1).path))
    (path / "latest").symlink_to(taken[1].name)
    assert [one.name for one in tensorferry.snapshot.find(path)] == [taken[1].name]
    run.take(path, keep=2)
    assert [file.name for file in taken[0].iterdir()] == ["notes.txt"]
    assert [one.number for one in tensorferry.snapshot.find(path)] == [2, 3]
    assert all((path / name).read_text() == "mine" for name in foreign)
    assert (path / "empty").is_dir()
    assert sorted(file.name for file in (elsewhere / "killed").iterdir()) == kept


def test_a_killed_take_is_removed_by_the_next_one_and_its_name_is_free(make, path, nvme):
    run = make()
    run.step()
    killed = Path(run.take(path).path)
    (killed / "commit.json").unlink()
    for left in ["snapshot-00000001", "snapshot-00000002"]:  # killed as it began
        (path / left).mkdir(exist_ok=True)
    (path / "snapshot-00000002" / ".rank-0.links.9-1.tensorferry").touch()
    assert run.take(path).name == "snapshot-00000001"
    assert len(links(nvme)) == 1
    (path / "snapshot-00000002" / "mine").touch()
    assert run.take(path).name == "snapshot-00000003"
    with pytest.raises(FileExistsError, match="choose another"):
        run.take(path, name="snapshot-00000002")


@pytest.fixture
def two(make, path):
    """The folders of two snapshots, the older one first."""
    seed_all(1)
    run = make("weights")
    run.step()
    taken = [run.take(path)]
    older = run.bits()
    run.step()
    taken.append(run.take(path))
    run.close()
    return [Path(one.path) for one in taken], older


@pytest.mark.parametrize(
    "file, damage",
    [
        ("commit.json", "damaged"),
        ("rank-0.json", "damaged"),
        ("rank-0.pt", "damaged"),
        ("rank-0.json", None),
        ("rank-0.pt", None),
    ],
)
def test_a_run_goes_on_from_an_older_snapshot_if_the_newest_is_damaged(
    file, damage, two, make, path
):
    (older, newest), expected = two
    if damage is None:
        (newest / file).unlink()
    else:
        text = bytearray((newest / file).read_bytes())
        text[len(text) // 2] ^= 1
        (newest / file).write_bytes(text)
    run = make("weights", seed=5)
    with pytest.warns(UserWarning, match=f"{newest}.*{damage or 'No such file'}.*{older}"):
        found = run.resume(path)
    assert found.snapshot.name == older.name
    assert_same_bits(run.bits(), expected)
    # Nothing else is done to it: its space stays, and its name.
    run.step()
    assert run.take(path, keep=2).name == "snapshot-00000003"
    if file != "commit.json":
        with pytest.raises(tensorferry.snapshot.Unusable, match="damaged"):
            run.resume(path, name=newest.name)
    tensorferry.snapshot.drop(path, newest.name)
    assert not newest.exists()


def test_damage_is_no_empty_folder(two, path):
    for folder in two[0]:
        (folder / "commit.json").write_text("{}")
    with pytest.raises(tensorferry.snapshot.Unusable, match="is damaged") as raised:
        tensorferry.snapshot.resume(path)
    assert all(str(folder) in str(raised.value) for folder in two[0])
    assert tensorferry.snapshot.find(path) == []


def test_a_folder_of_another_user_that_cannot_be_read_is_none_of_ours(two, path, monkeypatch):
    from tensorferry.snapshot import folder

    (path / "lost+found").mkdir()
    real = folder.read_json

    def read(file):
        if file.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "no", str(file))
        return real(file)

    monkeypatch.setattr(folder, "read_json", read)
    with pytest.raises(PermissionError):
        tensorferry.snapshot.find(path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert len(tensorferry.snapshot.find(path)) == 2


def test_a_later_format_is_not_passed_over(two, make, path):
    record = two[0][1] / "commit.json"
    record.write_text(record.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(tensorferry.snapshot.Unusable, match="has format 2"):
        make("weights").resume(path)


def test_nothing_is_freed_before_the_snapshot_has_durably_ended(make, path, nvme, monkeypatch):
    from tensorferry.snapshot import folder

    run = make()
    run.step()
    first = Path(run.take(path).path)
    ended = set()
    sync, drop, remove = folder.sync, tensorferry.SwapSpace.drop_snapshot, folder.remove_links

    def note_sync(where):
        sync(where)
        if where != path and not (where / "commit.json").exists():
            ended.add(where)

    def note_drop(space, name):
        assert first in ended, "the space is free"
        return drop(space, name)

    def note_remove(where, rank=None):
        assert where in ended, "the names are gone"
        remove(where, rank)

    monkeypatch.setattr(folder, "sync", note_sync)
    monkeypatch.setattr(folder, "remove_links", note_remove)
    monkeypatch.setattr(tensorferry.SwapSpace, "drop_snapshot", note_drop)
    second = Path(run.take(path, keep=1).path)
    assert ended == {first}
    tensorferry.snapshot.drop(path, second.name)
    killed = Path(run.take(path, name="killed").path)
    (killed / "commit.json").unlink()
    run.take(path)
    assert ended == {first, second, killed}


INTERRUPTED = [
    ("tensorferry.checkpoint", "save"),
    ("tensorferry:SwapSpace", "snapshot"),
    ("tensorferry.snapshot.folder", "write_links"),
    ("tensorferry.snapshot.folder", "write_manifest"),
    ("tensorferry.snapshot.taking", "random_states"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("owner, name", INTERRUPTED)
def test_a_take_that_is_interrupted_leaves_nothing_behind(
    owner, name, after, make, path, nvme, monkeypatch
):
    run = make("weights")
    run.step()
    run.take(path)
    run.step()

    def look():
        stats = run.optimizer.stats(), run.weights.stats()
        pinned = [one["snapshots"] for one in stats]
        return tensorferry.snapshot.find(path), sorted(path.iterdir()), links(nvme), pinned

    before = look()
    owner = pkgutil.resolve_name(owner)
    real = getattr(owner, name)

    def interrupted(*args, **options):
        if after:
            real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.take(path, keep=1)
    monkeypatch.undo()
    assert look() == before
    run.step()
    run.take(path, keep=1)
    assert len(tensorferry.snapshot.find(path)) == 1


def test_all_spaces_sync_at_the_same_time(make, path, monkeypatch):
    both = threading.Barrier(2)
    real = tensorferry.SwapSpace.snapshot

    def together(*args):
        both.wait(60)
        return real(*args)

    run = make("weights")
    run.step()
    monkeypatch.setattr(tensorferry.SwapSpace, "snapshot", together)
    run.take(path)


def test_a_snapshot_that_somebody_reads_gives_no_room(make, path, monkeypatch):
    from tensorferry.snapshot import folder

    run = make()
    run.step()
    older = run.take(path)
    real = tensorferry.SwapSpace.snapshot
    replaced = []

    def note(space, name, keys, names):
        replaced.append(list(names))
        return real(space, name, keys, names)

    monkeypatch.setattr(tensorferry.SwapSpace, "snapshot", note)
    with folder.in_use(older):
        newer = run.take(path, keep=1)
    run.take(path, keep=1)
    assert replaced[0] == [] and len(replaced[1]) == 2
    assert not Path(older.path).exists() and not Path(newer.path).exists()


def test_the_folder_itself_is_durable_too(tmp_path, monkeypatch):
    from tensorferry.snapshot import folder

    synced = []
    real = folder.sync
    monkeypatch.setattr(folder, "sync", lambda where: synced.append(where) or real(where))
    tensorferry.snapshot.take(tmp_path / "a" / "b")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)
    synced.clear()
    tensorferry.snapshot.take(tmp_path / "a" / "b")
    assert tmp_path not in synced


def test_a_program_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nvme").mkdir()
    Path("other").mkdir()
    run = Run("nvme", weights=True)
    run.step()
    first = run.take("snapshots")
    monkeypatch.chdir("other")
    for _ in range(3):
        run.step()
        run.take("../snapshots", keep=2)
    run.step()
    assert Path(first.path).is_absolute() and not list(Path().iterdir())
    monkeypatch.chdir("/")
    found = tensorferry.snapshot.find(tmp_path / "snapshots")
    assert [one.number for one in found] == [3, 4]
    assert len(links(tmp_path / "nvme")) == 4
    for one in found:
        tensorferry.snapshot.verify(tmp_path / "snapshots", one.name)
    run.resume(tmp_path / "snapshots")
    assert run.number == 4
    run.close()


def test_snapshots_stay_pinned_while_their_drive_has_another_name(make, path, nvme, tmp_path):
    run = make()
    run.step()
    run.take(path)
    nvme.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        run.take(path)
    assert run.optimizer.stats()["snapshots"] == 1
    (tmp_path / "elsewhere").rename(nvme)
    for _ in range(3):
        run.step()
    tensorferry.snapshot.verify(path)
    run.take(path)


def test_a_commit_that_fails_leaves_no_snapshot_and_the_next_one_clears_it_away(
    make, path, nvme, monkeypatch
):
    from tensorferry.snapshot import folder

    run = make()
    run.step()
    write = folder.write_json

    def fail_late(where, content):
        write(where, content)
        if where.name == "commit.json":
            raise OSError(errno.EIO, "sync")

    monkeypatch.setattr(folder, "write_json", fail_late)
    with pytest.raises(OSError, match="sync"):
        run.take(path)
    assert tensorferry.snapshot.find(path) == [] and links(nvme) == []
    uncommit = folder.uncommit
    monkeypatch.setattr(folder, "uncommit", lambda where: False)
    with pytest.raises(OSError, match="sync"):
        run.take(path)
    # Nobody knows whether it is whole: nothing is freed.
    assert tensorferry.snapshot.verify(path) and run.optimizer.stats()["snapshots"] == 1
    monkeypatch.setattr(folder, "uncommit", uncommit)
    monkeypatch.setattr(folder, "write_json", write)
    run.step()
    run.take(path, keep=1)
    assert len(tensorferry.snapshot.find(path)) == 1 and run.optimizer.stats()["snapshots"] == 1


def test_who_comes_while_a_snapshot_is_dropped_is_told(make, path, monkeypatch):
    from tensorferry.snapshot import folder

    run = make()
    run.step()
    taken = run.take(path)
    unlink = Path.unlink
    told = []

    def unlink_while_read(file, missing_ok=False):
        if file.name == "commit.json":
            reader = open(file, "rb")  # the lock is still held
            with pytest.raises(BlockingIOError):
                fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
            told.append(reader)
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_while_read)
    tensorferry.snapshot.drop(path, taken.name)
    [reader] = told
    monkeypatch.setattr(folder, "open", lambda *_: reader, raising=False)
    with pytest.raises(tensorferry.snapshot.Unusable, match="has been dropped meanwhile"):
        with folder.in_use(taken):
            pass


def test_a_snapshot_is_not_dropped_while_a_run_resumes_from_it(make, path, monkeypatch):
    run = make()
    run.step()
    taken = run.take(path)
    resume = run.optimizer.resume_part

    def resume_while_dropped(part):
        with pytest.raises(OSError, match="is reading this snapshot"):
            tensorferry.snapshot.drop(path, taken.name)
        resume(part)

    monkeypatch.setattr(run.optimizer, "resume_part", resume_while_dropped, raising=False)
    assert run.resume(path).snapshot == taken
