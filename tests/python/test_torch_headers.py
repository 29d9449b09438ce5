"""tensorferry/torch.h and tensorferry/deepspeed_py_aio.h, against the headers of pip's torch."""

import os
import subprocess
from pathlib import Path

import safetensors.torch
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TENSORFERRY_BUILD_DIR", ROOT / "build" / "release"))

# The published example, with only the include line changed and a directory put in.
DEEPSPEED_EXAMPLE = """
#include <torch/torch.h>
#include "tensorferry/deepspeed_py_aio.h"
#include "tensorferry/torch.h"

int main(int, char** argv) {
  const std::string checkpoint = std::string(argv[1]) + "/checkpoint.pt";
  auto tensor = torch::randn({1024, 1024});
  const char* filename = checkpoint.c_str();

  // Write operation
  int ret = deepspeed_py_aio_write(tensor, filename,
                                   1024*1024,  // 1MB block size
                                   128,        // queue depth
                                   false,      // batch submit
                                   true,       // overlap events
                                   false);     // no validation
  if (ret != 0) return 1;

  // Read operation
  auto buffer = torch::empty_like(tensor);
  ret = deepspeed_py_aio_read(buffer, filename,
                              1024*1024, 128, false, true, true);
  if (ret != 0 || !torch::equal(tensor, buffer)) return 2;

  // Failures
  errno = 0;
  if (deepspeed_py_aio_read(buffer, "/nonexistent", 4096, 1, false, true, false) != -1) return 3;
  if (errno != ENOENT) return 4;
  auto small = torch::empty({3});
  if (deepspeed_py_aio_read(small, filename, 4096, 1, false, true, false) != -1) return 5;
  if (deepspeed_py_aio_write(tensor, filename, 0, 1, false, true, false) != -1) return 6;

  // tensorferry/torch.h
  tensorferry::Handle handle;
  const std::string path = std::string(argv[1]) + "/state.bin";
  auto state = torch::randn({3, 1001}, torch::kBFloat16);
  tensorferry::write(handle, state, path, 77, tensorferry::Durability::data).wait();
  auto back = torch::empty_like(state);
  tensorferry::read(handle, back, path, 77).wait();
  if (!torch::equal(state, back)) return 7;
  tensorferry::aio_write(state, path);
  tensorferry::aio_read(back.zero_(), path, 4096, 4, false, true, true);
  if (!torch::equal(state, back)) return 8;
  for (const auto& bad : {state.t(), state.to(torch::kMeta), state.to_sparse(), at::Tensor()}) {
    try {
      (void)tensorferry::bytes_of(bad);
      return 9;
    } catch (const tensorferry::Error& error) {
      if (error.code() != EINVAL || error.hint().empty()) return 10;
    }
  }

  // Named tensors
  const std::string model = std::string(argv[1]) + "/model.safetensors";
  std::map<std::string, torch::Tensor> tensors{
      {"weight", state}, {"bias", torch::randn({7}, torch::kDouble)},
      {"steps", torch::tensor(3)}, {"none", torch::empty({0, 2})}};
  tensorferry::save_tensors(handle, model, tensors, {.metadata = {{{"format", "pt"}}}});
  const auto loaded =
      tensorferry::load_tensors(handle, model, torch::kCPU, tensorferry::Verify::required);
  if (loaded.size() != tensors.size()) return 11;
  for (const auto& [name, tensor] : tensors) {
    if (!torch::equal(loaded.at(name), tensor)) return 12;
    if (loaded.at(name).scalar_type() != tensor.scalar_type()) return 13;
  }
  try {
    tensorferry::save_tensors(handle, model, {{"z", torch::zeros({2}, torch::kComplexDouble)}});
    return 14;
  } catch (const tensorferry::Error& error) {
    if (error.code() != EINVAL) return 15;
  }
  return 0;
}
"""


def test_the_published_example_compiles_and_runs(tmp_path):
    source, program = tmp_path / "example.cc", tmp_path / "example"
    source.write_text(DEEPSPEED_EXAMPLE)
    torch_lib = Path(torch.__file__).parent / "lib"
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O0",
            "-Wall",
            "-Werror",
            "-D_GLIBCXX_USE_CXX11_ABI=" + str(int(torch.compiled_with_cxx11_abi())),
            f"-I{ROOT / 'include'}",
            *includes,
            source,
            "-o",
            program,
            f"-L{BUILD}",
            "-ltensorferry",
            f"-Wl,-rpath,{BUILD}",
            f"-L{torch_lib}",
            "-ltorch",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{torch_lib}",
        ],
        check=True,
        timeout=600,
    )
    done = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert done.stdout.count("Elapsed time(usec): aio = ") == 2
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in saved.items()} == {
        "weight": [3, 1001],
        "bias": [7],
        "steps": [],
        "none": [0, 2],
    }
