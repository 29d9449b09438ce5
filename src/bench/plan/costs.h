// What the parts of a step and of a pass cost: measured, each with the command that measures it.
//
// `tensorferry plan --check DIR --json FILE` measures all of them on a machine, those of its GPU
// with --gpu-memory, and --costs FILE takes what it found. `python -m tensorferry.plan DIR` prints
// them, under the names that they have here; python/tensorferry/plan/costs.py says how. Copies are
// measured with a GPU only. The numbers here are those of two machines: the processor with two
// cores and the H200 of docs/performance.md.
#pragma once

namespace tensorferry::bench {

// Costs of one rank that has its machine, or its GPU, for itself. Seconds.
struct Costs {
  // The step, for each parameter: steps of parameters whose states are in memory, in each form,
  // and their differences.
  double adam_seconds = 1.3e-9;    // AdamW or Adam in fp32
  double sgd_seconds = 0.8e-9;     // SGD with momentum in fp32
  double master_seconds = 0.4e-9;  // a gradient to fp32, and the result back to 16 bits
  double cut_seconds = 1.0e-9;     // joins the halves of a master, and cuts it
  double pack_seconds = 2.0e-9;    // both moments from 8 bits and back

  // For each sub-group, whatever its size: steps of many small sub-groups.
  double group_seconds = 0.5e-3;
  // And for each whose computation takes memory, which goes back to the system: SGD, and gradients
  // on the drive. Steps of SGD in many sub-groups, less those in few.
  double taking_seconds = 1e-3;

  // For each read or write of the drive until its first byte: reads of a page.
  double operation_seconds = 0.2e-3;

  // A pass, forward and backward: for each parameter, whatever the tokens, and for each module:
  // passes of few tokens and of many, and of small modules whose weights are on the drive. The
  // floating-point operations come from --flops.
  double pass_seconds = 0.3e-9;
  double module_seconds = 50e-6;

  // A gradient that goes to the drive, for each byte: passes that store gradients, less others.
  double gradient_byte_seconds = 0.3e-9;

  // Copies between memory of the system and of a GPU, bytes per second each way, and both together
  // while both go on: copies of 256 MiB.
  double copy_read = 50e9;
  double copy_write = 50e9;
  double copy_both = 80e9;

  // Bytes of memory of a process that has imported torch and tensorferry: its resident memory.
  double process_bytes = 500e6;

  // What the passes of a processor take besides weights, gradients and activations:
  // the peak of passes, less these.
  double working_bytes = 60e6;
};

// On the GPU of docs/performance.md, one H200.
[[nodiscard]] inline Costs gpu_costs() {
  Costs costs;
  costs.adam_seconds = 7e-12;
  costs.sgd_seconds = 5e-12;
  costs.master_seconds = 5e-12;
  costs.cut_seconds = 40e-12;
  costs.pack_seconds = 40e-12;
  costs.group_seconds = 1e-3;
  costs.taking_seconds = 0.2e-3;
  costs.operation_seconds = 0.3e-3;
  costs.pass_seconds = 3e-12;
  costs.module_seconds = 30e-6;
  costs.gradient_byte_seconds = 1e-12;
  costs.copy_read = 55e9;
  costs.copy_write = 55e9;
  costs.copy_both = 90e9;
  costs.process_bytes = 3e9;
  costs.working_bytes = 0;
  return costs;
}

}  // namespace tensorferry::bench
