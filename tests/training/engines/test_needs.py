"""What an engine needs and the machine may lack."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist.presets.catalogue import ds_config
from hf_dist.training.engines import needs


def test_a_compiler_is_needed_for_offload(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    environ = {**os.environ, "CXX": "no-such-compiler"}
    (problem,) = needs.missing_needs(ds_config("zero2_offload"), environ, on_cpu=True)
    assert "'no-such-compiler' is not there" in problem and "apt-get install g++" in problem
    assert needs.missing_needs(ds_config("zero2"), environ, on_cpu=True) == []


def test_ninja_of_an_environment_that_is_not_activated_is_found(tmp_path, monkeypatch):
    programs = tmp_path / "venv"
    programs.mkdir()
    (programs / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    environ = {"PATH": str(tmp_path)}
    needs.show_own_ninja(environ)
    assert environ["PATH"] == f"{tmp_path}{os.pathsep}{programs}"
    with_one = {"PATH": str(programs)}
    needs.show_own_ninja(with_one)
    assert with_one["PATH"] == str(programs)


def test_libaio_is_needed_for_nvme(monkeypatch, tmp_path):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(needs, "_has_libaio", lambda: False)
    found = needs.missing_needs(ds_config("zero3_nvme", nvme_path=str(tmp_path)), os.environ, on_cpu=True)
    assert len(found) == 1 and "libaio-dev" in found[0]


def test_the_nvme_folder_must_be_writable(tmp_path):
    assert needs.nvme_path_problems(str(tmp_path / "new" / "folder")) == []
    (tmp_path / "file").write_text("")
    (problem,) = needs.nvme_path_problems(str(tmp_path / "file"))
    assert "can't write" in problem and "HF_DIST_NVME_PATH" in problem
    (problem,) = needs.nvme_path_problems("/proc/nowhere")
    assert "can't write" in problem
    (problem,) = needs.nvme_path_problems("/local_nvme")
    assert "doesn't exist" in problem and "HF_DIST_NVME_PATH" in problem


def test_the_disk_must_hold_the_model(tmp_path):
    config = ds_config("zero3_nvme", nvme_path=str(tmp_path))
    assert needs.nvme_space_problem(config, 1000) is None
    # 20 bytes each: master weight, two moments, gradient, parameter
    assert "needs 20000000.0 GB" in str(needs.nvme_space_problem(config, 10**15))
    assert needs.nvme_space_problem(ds_config("zero3"), 10**15) is None


def _lock(folder: Path, *, built: bool, age: float) -> Path:
    from torch.utils import cpp_extension

    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    lock = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False), "lock")
    lock.write_text("")
    os.utime(lock, (time.time() - age,) * 2)
    if built:
        lock.with_name("cpu_adam.so").write_text("")
    return lock


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_a_fresh_lock_is_respected(extensions):
    lock = _lock(extensions, built=True, age=5)
    assert needs.stale_locks(["cpu_adam"]) == [] and lock.exists()


def test_a_stale_lock_beside_a_built_library_is_removed(extensions):
    lock = _lock(extensions, built=True, age=100)
    assert needs.stale_locks(["cpu_adam"]) == [] and not lock.exists()


def test_a_stale_lock_without_a_library_is_reported(extensions):
    assert needs.stale_locks(["cpu_adam"]) == []
    lock = _lock(extensions, built=False, age=100)
    assert needs.stale_locks(["cpu_adam"]) == []
    lock = _lock(extensions, built=False, age=1000)
    (problem,) = needs.stale_locks(["cpu_adam"])
    assert f"rm {lock}" in problem and lock.exists()


def test_a_lock_that_a_process_holds_is_respected(extensions):
    lock = _lock(extensions, built=True, age=1000)
    lock.unlink()
    # As torch takes it, in a process that then compiles for long.
    code = (
        "import sys; from torch.utils.file_baton import FileBaton; "
        f"assert FileBaton({str(lock)!r}).try_acquire(); print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        os.utime(lock, (time.time() - 1000,) * 2)
        assert needs.stale_locks(["cpu_adam"]) == [] and lock.exists()
    finally:
        holder.kill()
        holder.communicate()
    assert needs.stale_locks(["cpu_adam"]) == [] and not lock.exists()
