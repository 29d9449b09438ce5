"""tensorferry/torch.h with tensors of a GPU, compiled here against torch's headers."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "carry" / "libtensorferry.so.0.1"

PROGRAM = r"""
#include <torch/torch.h>
#include "tensorferry/torch.h"

int main(int, char** argv) {
  const std::string path = argv[1];
  tensorferry::Handle handle;
  const auto on_gpu = torch::TensorOptions().device(torch::kCUDA);
  auto state = torch::randn({3000, 1001}, on_gpu);
  for (int i = 0; i < 200; ++i) state = state * 1.0001;  // queued, not done
  tensorferry::write(handle, state, path, 77).wait();
  auto back = torch::empty_like(state);
  tensorferry::read(handle, back, path, 77).wait();
  if (!torch::equal(state, back)) return 1;
  state.add_(1);
  tensorferry::aio_write(state, path, 1 << 20, 32, false, true, true);
  tensorferry::aio_read(back.zero_(), path, 1 << 20, 32, false, true, true);
  if (!torch::equal(state, back)) return 2;
  if (!tensorferry::is_on_gpu(tensorferry::bytes_of(state))) return 3;
  const tensorferry::GpuBuffer own(1 << 20);
  handle.read_now(own.bytes(), path);
  handle.write_now(own.bytes(), path + ".copy");
  return 0;
}
"""


def test_tensors_of_a_gpu_in_cpp(tmp_path):
    if not LIBRARY.exists():
        pytest.skip("make gpu-wheels has not laid the library into build/carry")
    source = tmp_path / "program.cc"
    source.write_text(PROGRAM)
    (tmp_path / "libtensorferry.so.0.1").symlink_to(LIBRARY)
    library = Path(torch.__file__).parent / "lib"
    includes = [f"-I{folder}" for folder in [ROOT / "include", *cpp_extension.include_paths()]]
    subprocess.run(
        ["g++", "-std=c++20", "-O0", *includes, str(source), "-o", str(tmp_path / "program"),
         str(LIBRARY), f"-L{library}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10",
         "-ltorch_cuda", "-lc10_cuda", f"-Wl,-rpath,{library}:{tmp_path}"],
        check=True, timeout=300,
    )  # fmt: skip
    path = tmp_path / "state.bin"
    done = subprocess.run([tmp_path / "program", path], timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "state.bin.copy").read_bytes() == path.read_bytes()[: 1 << 20]
