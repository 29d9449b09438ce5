"""Bad input and bad luck: a clear error, nothing lost, and the handle works on."""

import errno
import os

import pytest
import torch

import tensorferry
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
    raised(IsADirectoryError, lambda: aio_read(tensor, str(tmp_path)),
           lambda: aio_write(tensor, str(tmp_path)), filename=str(tmp_path))
    assert handle.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_permissions(tensor, tmp_path):
    from programs import check_python

    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 10_000)
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
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
    "settings", [dict(block_size=0), dict(block_size=-4096), dict(queue_depth=0),
                 dict(queue_depth=10**9), dict(queue_depth=-1)], ids=str
)
def test_settings_out_of_range(tensor, path, settings):
    raised(
        InvalidArgument,
        lambda: aio_handle(**settings),
        lambda: aio_write(tensor, path, **settings),
        code=errno.EINVAL,
    )
    assert not os.path.exists(path)


@pytest.mark.parametrize("workers", [0, -1, 10**6])
def test_workers_out_of_range(workers):
    raised(InvalidArgument, lambda: aio_handle(intra_op_parallelism=workers), code=errno.EINVAL)


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
    raised(OSError, lambda: handle.async_pwrite(tensor, descriptor),
           lambda: handle.async_pread(tensor, fd=descriptor), code=errno.EBADF)
    raised(InvalidArgument, lambda: handle.async_pread(tensor, -1),
           lambda: handle.async_pread(tensor, 2**40))
    assert handle.wait() == 0


def test_reading_past_the_end(tensor, path):
    handle = aio_handle()
    handle.sync_pwrite(tensor, path)
    big = torch.zeros(3_000_000, dtype=torch.uint8)
    handle.async_pread(big, path)
    problem = raised(OSError, lambda: handle.sync_pread(tensor, path, 1), handle.wait,
                     code=errno.ENODATA, filename=path)
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
        os.system(f"umount {mount}")


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
            problem.errno, problem.filename, problem.hint)
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
