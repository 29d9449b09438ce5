"""Bad input and bad luck: a clear error, nothing lost, and the handle works on."""

import errno
import os

import pytest
import tensorferry
import torch
from loop_mount import unmount
from tensorferry import Handle, InvalidArgument, aio_handle, aio_read, aio_write


def raised(error, *calls, code=None, **facts):
    """Each call raises `error` with these facts."""
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        problem = caught.value
        assert isinstance(problem, OSError)
        assert problem.errno and problem.strerror and hasattr(problem, "hint")
        assert code is None or problem.errno == code
        for name, value in facts.items():
            assert getattr(problem, name) == value, name
    return problem


@pytest.fixture
def tensor():
    return torch.arange(10_000, dtype=torch.uint8)


def test_python_keeps_its_own_subclasses(tensor, tmp_path):
    missing = str(tmp_path / "missing")
    handle = aio_handle()
    raised(
        FileNotFoundError,
        lambda: aio_read(tensor, missing),
        lambda: handle.sync_pread(tensor, missing),
        lambda: handle.async_pread(tensor, missing),
        lambda: aio_write(tensor, missing + "/below"),
        lambda: Handle().read(tensor, missing),
        lambda: tensorferry.validate(tensor, missing),
        code=errno.ENOENT,
    )
    assert raised(FileNotFoundError, lambda: aio_read(tensor, missing)).filename == missing
    raised(
        IsADirectoryError,
        lambda: aio_read(tensor, str(tmp_path)),
        lambda: aio_write(tensor, str(tmp_path)),
        filename=str(tmp_path),
    )
    assert handle.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_permissions(tensor, tmp_path):
    from programs import check_python, let_others_in

    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 10_000)
    secret.chmod(0o600)
    let_others_in(tmp_path)
    check_python(
        """
        import os, sys, tensorferry
        os.setuid(65534)
        try:
            tensorferry.aio_read(bytearray(10_000), sys.argv[1])
        except PermissionError as error:
            assert error.filename == sys.argv[1] and "permission" in error.hint, error
        else:
            raise SystemExit("no error")
        """,
        secret,
    )


@pytest.mark.parametrize("offset", [-1, -(10**30), 2**63, 10**30])
def test_offsets_out_of_range(tensor, path, offset):
    handle = aio_handle()
    handle.sync_pwrite(tensor, path)
    raised(
        InvalidArgument,
        lambda: handle.sync_pread(tensor, path, offset),
        lambda: handle.async_pwrite(tensor, path, offset),
        lambda: handle.read(tensor, path, False, offset),
        code=errno.EINVAL,
    )
    with pytest.raises(TypeError):
        handle.sync_pread(tensor, path, 1.5)
    assert handle.wait() == 0 and handle.sync_pread(tensor, path) == 1


def test_the_end_of_the_address_space_of_files(tensor, path):
    handle = aio_handle()
    handle.sync_pwrite(tensor, path)
    for offset in (2**63 - 1, 2**63 - 10_000, 2**62):
        raised(OSError, lambda: handle.sync_pwrite(tensor, path, offset))
        raised(OSError, lambda: handle.sync_pread(tensor, path, offset))
    assert os.path.getsize(path) == 10_000


@pytest.mark.parametrize(
    "settings",
    [
        dict(block_size=0),
        dict(block_size=-4096),
        dict(queue_depth=0),
        dict(queue_depth=10**9),
        dict(queue_depth=-1),
        dict(block_size=2 << 30),
    ],
    ids=str,
)
def test_settings_out_of_range(tensor, path, settings):
    [(name, value)] = settings.items()
    for call in (lambda: aio_handle(**settings), lambda: aio_write(tensor, path, **settings)):
        problem = raised(InvalidArgument, call, code=errno.EINVAL, operation="open handle")
        assert problem.hint.startswith(f"{name} is {value}; it must be from 1 to ")
    assert not os.path.exists(path)


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_settings_are_numbers(name):
    for wrong in (None, 1.5, "8"):
        with pytest.raises(TypeError):
            aio_handle(**{name: wrong})


def test_the_largest_settings_are_those_of_a_handle():
    handle = aio_handle(1 << 30, 4096, intra_op_parallelism=256)
    assert handle.get_queue_depth() == 4096
    for name, most in dict(block_bytes=1 << 30, queue_depth=4096, workers=256).items():
        raised(InvalidArgument, lambda: Handle(**{name: most + 1}))


@pytest.mark.parametrize("workers", [0, -1, 10**6])
def test_workers_out_of_range(workers):
    problem = raised(
        InvalidArgument, lambda: aio_handle(intra_op_parallelism=workers), code=errno.EINVAL
    )
    assert "intra_op_parallelism" in problem.hint


@pytest.mark.parametrize("offset", [-1, 1 << 63])
def test_a_wrong_offset_is_named_as_it_was_given(tensor, path, offset):
    handle = aio_handle()
    for call in (handle.sync_pwrite, handle.sync_pread, handle.async_pwrite, handle.async_pread):
        problem = raised(InvalidArgument, lambda: call(tensor, path, offset))
        assert f"file_offset is {offset}" in problem.hint
    assert not os.path.exists(path) and handle.wait() == 0


def test_what_cannot_be_written_makes_no_file(path):
    for call in (aio_handle().sync_pwrite, aio_handle().async_pwrite, aio_write):
        with pytest.raises((TypeError, OSError)):
            call(object(), path)
    assert not os.path.exists(path)


def test_files_are_the_users_alone_as_deepspeeds(tensor, path):
    before = os.umask(0o022)
    try:
        handle = aio_handle()
        handle.sync_pwrite(tensor, f"{path}.sync")
        handle.async_pwrite(tensor, f"{path}.async")
        handle.wait()
        aio_write(tensor, f"{path}.once")
        Handle().write_now(tensor, f"{path}.native")
        tensorferry.File(f"{path}.private", "write", permissions=0o640)
    finally:
        os.umask(before)
    modes = {
        name: os.stat(f"{path}.{name}").st_mode & 0o777
        for name in ("sync", "async", "once", "native", "private")
    }
    alone = 0o600
    assert modes == dict(sync=alone, **{"async": alone}, once=alone, native=0o644, private=0o640)


def test_validation_raises_wherever_it_is_asked_for(tensor, path, monkeypatch):
    """Each of them looks at the file anew."""
    looked = []

    def differs(*_):
        looked.append(True)
        raise InvalidArgument(errno.EBADMSG, "validate: they differ")

    handle = aio_handle()
    handle.sync_pwrite(tensor, path)
    monkeypatch.setattr(tensorferry.aio._core, "validate", differs)
    calls = [
        lambda: aio_read(tensor, path, validate=True),
        lambda: aio_write(tensor, path, validate=True),
        lambda: handle.read(tensor, path, True),
        lambda: handle.write(tensor, path, True),
        lambda: handle.pread(tensor, path, True, False),
        lambda: handle.pwrite(tensor, path, True, False),
    ]
    for call in calls:
        with pytest.raises(OSError, match="they differ"):
            call()
    assert len(looked) == len(calls)


def test_a_path_with_nul(tensor):
    for call in (aio_read, aio_write):
        with pytest.raises(ValueError, match="null"):
            call(tensor, "a\0b")
    with pytest.raises(ValueError, match="null"):
        Handle().read(tensor, b"a\0b")


def test_a_closed_descriptor(tensor, path):
    handle = aio_handle()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.close(descriptor)
    raised(
        OSError,
        lambda: handle.async_pwrite(tensor, descriptor),
        lambda: handle.async_pread(tensor, fd=descriptor),
        code=errno.EBADF,
    )
    raised(
        InvalidArgument,
        lambda: handle.async_pread(tensor, -1),
        lambda: handle.async_pread(tensor, 2**40),
    )
    assert handle.wait() == 0


def test_reading_past_the_end(tensor, path):
    handle = aio_handle()
    handle.sync_pwrite(tensor, path)
    big = torch.zeros(3_000_000, dtype=torch.uint8)
    handle.async_pread(big, path)
    problem = raised(
        OSError,
        lambda: handle.sync_pread(tensor, path, 1),
        handle.wait,
        code=errno.ENODATA,
        filename=path,
    )
    assert "ends at offset 10000" in str(problem) and problem.length > 0
    assert handle.sync_pread(tensor, path) == 1


def test_a_full_disk_is_an_error_with_the_path(tmp_path):
    from programs import check_python

    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m none {mount}") != 0:
        pytest.skip("cannot mount")
    try:
        check_python(
            """
            import errno, sys, tensorferry
            handle = tensorferry.aio_handle()
            handle.async_pwrite(bytes(4 << 20), sys.argv[1])
            try:
                handle.wait()
            except OSError as error:
                assert error.errno == errno.ENOSPC and error.filename == sys.argv[1], error
                assert "full" in error.hint and error.offset is not None
            else:
                raise SystemExit("a full disk counted as success")
            assert handle.wait() == 0
            """,
            mount / "data.bin",
        )
    finally:
        unmount(mount)


def test_an_error_reads_well(tensor, tmp_path):
    missing = str(tmp_path / "missing")
    problem = raised(FileNotFoundError, lambda: aio_read(tensor, missing))
    assert str(problem) == (
        f"[Errno 2] open: No such file or directory: no such file; check the path: '{missing}'"
    )
    assert problem.operation == "open" and problem.hint == "no such file; check the path"


def test_errors_can_be_pickled_and_copied(tensor, tmp_path):
    import copy
    import pickle

    problem = raised(FileNotFoundError, lambda: aio_read(tensor, str(tmp_path / "missing")))
    for again in (pickle.loads(pickle.dumps(problem)), copy.copy(problem)):
        assert (again.errno, again.filename, again.hint) == (
            problem.errno,
            problem.filename,
            problem.hint,
        )
    problem = raised(InvalidArgument, lambda: aio_handle(0))
    assert pickle.loads(pickle.dumps(problem)).errno == errno.EINVAL


def test_a_trace_that_cannot_be_opened_is_said(tmp_path):
    from programs import check_python

    said = check_python(
        "import tensorferry; print(*tensorferry.Handle().stats()['fallback_reasons'])",
        TENSORFERRY_TRACE=str(tmp_path / "missing" / "trace.json"),
    )
    assert "TENSORFERRY_TRACE" in said and "missing/trace.json: ENOENT" in said


def test_a_trace_that_cannot_go_on_is_said_and_stays_readable(tmp_path):
    import json

    from programs import check_python

    trace = tmp_path / "trace.json"
    said = check_python(
        """
        import resource, sys
        import tensorferry
        handle = tensorferry.Handle()
        handle.write_now(b"x", sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        for _ in range(4000):
            handle.read_now(bytearray(1), sys.argv[1])
        print(*handle.stats()["fallback_reasons"])
        handle.close()
        """,
        tmp_path / "data",
        TENSORFERRY_TRACE=str(trace),
    )
    assert "TENSORFERRY_TRACE: write: EFBIG" in said
    assert len(json.loads(trace.read_text())) > 1000
