"""The settings of a DeepSpeed configuration.

Config honours a key that changes numbers, or raises. It collects keys that only concern DeepSpeed's
own machinery in `ignored`. For any other key it raises and names the nearest known one."""

from __future__ import annotations

from typing import Any

from ..aio import MOST
from .sections import REQUIRED, ConfigError, Section


class Config:
    """The settings of a configuration."""

    def __init__(self, values: dict[str, Any], world_size: int = 1) -> None:
        self.ignored: list[str] = []
        self.world_size = world_size
        top = Section(values, "", self.ignored)
        self._read_batches(top, world_size)
        self.gradient_clipping = top.number("gradient_clipping", 0.0, least=0)
        self._read_precision(top)
        self._read_optimizer(top)
        self._read_aio(top.optional_section("aio"))
        self._read_zero(top.section("zero_optimization"))
        _refuse_numbers(top)
        for key in ("communication_data_type", "seq_parallel_communication_data_type"):
            if world_size > 1:
                top.refuse(key, None, "torch reduces gradients in their own dtype")
            top.machinery(key)
        top.machinery(*_MACHINERY)
        top.done()

    def _read_batches(self, top: Section, world_size: int) -> None:
        batch = top.whole("train_batch_size", None, least=1)
        micro = top.whole("train_micro_batch_size_per_gpu", None, least=1)
        steps = top.whole("gradient_accumulation_steps", None, least=1)
        if steps is None and batch is not None and micro is not None:
            steps, rest = divmod(batch, micro * world_size)
            if rest or steps < 1:
                raise ConfigError(
                    f"train_batch_size {batch} is not a multiple of train_micro_batch_size_per_gpu "
                    f"{micro} times {world_size} ranks"
                )
        self.gradient_accumulation_steps = steps or 1
        if batch and micro and batch != micro * world_size * self.gradient_accumulation_steps:
            raise ConfigError(
                f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} x {world_size} "
                "ranks"
            )

    def _read_precision(self, top: Section) -> None:
        self.dtype: str | None = None
        self.check_overflow = False
        self.loss_scale: dict[str, Any] | None = None  # the arguments of a LossScale
        bf16 = top.section(("bf16", "bfloat16"))
        if bf16.boolean("enabled", False):
            self.dtype = "bfloat16"
            self.check_overflow = bf16.boolean("check_grad_overflow", True)
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            bf16.refuse(key, False, "tensorferry keeps masters and states in fp32")
        bf16.machinery("immediate_grad_update", "check_grad_overflow")
        bf16.done()
        fp16 = top.section("fp16")
        if fp16.boolean("enabled", False):
            if self.dtype is not None:
                raise ConfigError("bf16.enabled and fp16.enabled are both true: choose one")
            self.dtype = "float16"
            self.check_overflow = True
            self.loss_scale = {
                "static": fp16.number("loss_scale", 0, least=0),
                "power": fp16.whole("initial_scale_power", 16, least=0),
                "window": fp16.whole("loss_scale_window", 1000, least=1),
                "hysteresis": fp16.whole("hysteresis", 2, least=1),
                "consecutive": fp16.boolean("consecutive_hysteresis", False),
                "least": fp16.number("min_loss_scale", 1, least=0),
            }
        fp16.refuse("auto_cast", False, "cast the inputs of the model to fp16 yourself")
        fp16.refuse("fp16_master_weights_and_grads", False, "tensorferry keeps masters in fp32")
        fp16.machinery(
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
        fp16.done()

    def _read_optimizer(self, top: Section) -> None:
        self.optimizer: tuple[Any, Section] | None = None  # type, params
        self.scheduler: tuple[Any, Section] | None = None
        if (section := top.optional_section("optimizer")) is not None:
            name = section.anything("type", REQUIRED)
            params = section.anything("params", {})
            section.machinery("legacy_fusion")
            section.done()
            self.optimizer = (name, Section(params, "optimizer.params", self.ignored))
        if (section := top.optional_section("scheduler")) is not None:
            name = section.anything("type", REQUIRED)
            params = section.anything("params", {})
            section.done()
            self.scheduler = (name, Section(params, "scheduler.params", self.ignored))

    def _read_aio(self, aio: Section | None) -> None:
        self.handle_options: dict[str, Any] = {}  # none: those that suit the drive
        if aio is None:
            return
        self.handle_options = {
            "block_bytes": aio.whole("block_size", 1048576, 1, MOST["block_size"]),
            "queue_depth": aio.whole("queue_depth", 8, 1, MOST["queue_depth"]),
            "workers": aio.whole(
                ("intra_op_parallelism", "thread_count", "num_threads"),
                1,
                1,
                MOST["intra_op_parallelism"],
            ),
            "submit": "single" if aio.boolean("single_submit", False) else "batch",
            "overlap": aio.boolean("overlap_events", True),
        }
        aio.machinery("use_gds")
        aio.done()

    def _read_zero(self, zero: Section) -> None:
        self.offload_optimizer = self._read_offload(zero.section("offload_optimizer"), 4)
        self.offload_param = self._read_offload(zero.section("offload_param"), 5)
        zero.refuse("cpu_offload", None, 'use "offload_optimizer": {"device": "cpu"}')
        zero.refuse("cpu_offload_param", None, 'use "offload_param": {"device": "cpu"}')
        for key in (
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_weights",
        ):
            zero.refuse(key, False, "tensorferry moves weights and gradients unchanged")
        self.stage = zero.whole("stage", 0, 0, 3)
        if self.world_size == 1:  # nothing can be sharded
            zero.machinery("stage")
        zero.machinery(*_ZERO_MACHINERY)
        zero.done()

    def _read_offload(self, section: Section, buffer_count: int) -> dict[str, Any]:
        """Reads one of the two offload sections. `buffer_count` is its default."""
        is_param = section.path("").startswith("zero_optimization.offload_param")
        device = section.choice("device", "none", ("none", "cpu", "nvme"))
        if device == "cpu":
            section.machinery("device")
        result = {
            "device": device,
            "nvme_path": section.paths("nvme_path"),
            "buffer_count": section.whole("buffer_count", buffer_count, least=1),
            "pin_memory": section.boolean("pin_memory", True),
        }
        if is_param:
            result["buffer_size"] = section.whole("buffer_size", 10**8, least=1)
            result["max_in_cpu"] = section.whole("max_in_cpu", 10**9, least=0)
        else:
            result["pipeline_read"] = section.boolean("pipeline_read", True)
            result["pipeline_write"] = section.boolean("pipeline_write", False)
            result["fast_init"] = section.boolean("fast_init", False)
            result["ratio"] = section.share("ratio", 1.0)
            section.refuse("super_offload", False, "not supported here")
            section.machinery("cpuadam_cores_perc")
        section.done()
        if device == "nvme" and not result["nvme_path"]:
            raise ConfigError(
                f"{section.path('nvme_path')} is missing: name a directory on the drive"
            )
        return result


def _refuse_numbers(top: Section) -> None:
    """Raises ConfigError for keys that change numbers and that tensorferry cannot honour."""
    top.refuse("sparse_gradients", False, "gradients must be dense")
    top.refuse("prescale_gradients", False, "torch averages the gradients")
    top.refuse("gradient_predivide_factor", 1.0, "torch averages the gradients")
    top.refuse("gradient_allreduce_op", "mean", "torch averages the gradients")
    top.refuse("compression_training", None, "not supported here")
    for name in ("curriculum_learning", "data_efficiency", "elasticity"):
        if (section := top.optional_section(name)) is not None and section.boolean(
            "enabled", False
        ):
            raise ConfigError(f"{name}.enabled is true: not supported here")
    for name in ("amp", "torch_autocast"):
        if (section := top.optional_section(name)) is not None and section.boolean(
            "enabled", False
        ):
            raise ConfigError(f"{name}.enabled is true: use torch.autocast in your program")
    if (section := top.optional_section("data_types")) is not None:
        section.refuse("grad_accum_dtype", None, "gradients accumulate in the dtype of the model")
        section.machinery("param_dtype", "buffer_dtype")
        section.done()


_MACHINERY = (
    "activation_checkpointing",
    "autotuning",
    "check_overflow",
    "checkpoint",
    "comms_logger",
    "compile",
    "csv_monitor",
    "dataloader_drop_last",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "monitor_config",
    "steps_per_print",
    "tensorboard",
    "use_data_before_expert_parallelism",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)

_ZERO_MACHINERY = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "elastic_checkpoint",
    "gather_16bit_weights_on_model_save",
    "ignore_unused_parameters",
    "leaf_module",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "max_live_parameters",
    "max_reuse_distance",
    "memory_efficient_linear",
    "mics_hierarchical_params_gather",
    "mics_shard_size",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "overlap_comm",
    "override_module_apply",
    "param_persistence_threshold",
    "pipeline_loading_checkpoint",
    "prefetch_bucket_size",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
)
