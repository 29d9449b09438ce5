"""NewFile: a file that takes its name only when it is whole."""

import os

import pytest
from tensorferry import File, Handle, InvalidArgument, NewFile


def test_it_takes_its_name_at_commit(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    with Handle() as handle, NewFile(path) as new:
        assert new.path == str(path) and isinstance(new.file, File)
        handle.write_now(b"new and whole", new.file)
        assert path.read_bytes() == b"old"
        new.commit()
        assert path.read_bytes() == b"new and whole"
        assert new.file.closed
        with pytest.raises(InvalidArgument):
            new.commit()
    assert os.listdir(tmp_path) == ["model"]


def test_without_commit_nothing_is_left(tmp_path):
    path = tmp_path / "model"
    with Handle() as handle:
        with NewFile(path) as new:
            handle.write_now(b"half", new.file)
        with pytest.raises(KeyboardInterrupt), NewFile(path) as new:
            raise KeyboardInterrupt
        new = NewFile(path)
        new.discard()
        new.discard()
        assert new.file.closed
    assert os.listdir(tmp_path) == []


def test_a_reserved_file_has_its_length_and_space_before_it_is_written(tmp_path):
    path = tmp_path / "model"
    data = os.urandom(5 << 20)
    with Handle() as handle, NewFile(path) as new:
        new.reserve(len(data))
        facts = os.stat(new.file.path)
        if new.file.direct:
            assert facts.st_size == len(data) and facts.st_blocks * 512 >= len(data)
        handle.write_now(data, new.file)
        new.commit()
    assert path.read_bytes() == data


def test_space_that_is_not_there_is_not_reserved(tmp_path):
    with NewFile(tmp_path / "model") as new:
        new.reserve(1 << 60)
        assert new.file.size == 0
    for wrong in (-1, "many"):
        with NewFile(tmp_path / "model") as new, pytest.raises((InvalidArgument, TypeError)):
            new.reserve(wrong)


def test_a_new_file_has_the_permissions_asked_for_or_those_of_the_old_one(tmp_path):
    path = tmp_path / "model"
    with NewFile(path, permissions=0o640) as new:
        new.commit()
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()
    path.chmod(0o604)
    with NewFile(path) as new:
        new.commit()
    assert path.stat().st_mode & 0o777 == 0o604


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_path_that_cannot_be_replaced_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        NewFile(tmp_path)
    with pytest.raises(FileNotFoundError):
        NewFile(tmp_path / "no" / "folder")
    with pytest.raises(TypeError):
        NewFile(3.5)
