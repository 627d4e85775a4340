"""What of a running engine moves acceptance or speed: read from its own configuration, by name.

Source: vllm/config (model.py, scheduler.py, cache.py, parallel.py, speculative.py), vLLM 0.32.
"""

from typing import Any

# The command line's name of every setting that another server needs to be its like.
FLAGS = {
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_block_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "stream_interval": "--stream-interval",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--data-parallel-size",
    "generation_config": "--generation-config",
}
SWITCHES = {
    "prefix_caching": "--enable-prefix-caching",
    "chunked_prefill": "--enable-chunked-prefill",
    "enforce_eager": "--enforce-eager",
}


def engine_settings(vllm_config: Any) -> dict[str, Any]:
    """Plain values; what a drafter brings along stands apart, under ``speculation``."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    cache, parallel, speculative = (
        getattr(vllm_config, name) for name in ("cache_config", "parallel_config", "speculative_config")
    )
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "kv_block_size": cache.block_size,
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization) if model.quantization else None,
        "enforce_eager": bool(model.enforce_eager),
        "stream_interval": scheduler.stream_interval,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "generation_config": model.generation_config,
        "lora": getattr(vllm_config, "lora_config", None) is not None,
        "device": str(vllm_config.device_config.device_type),
        "speculation": {
            "method": speculative.method if speculative else None,
            "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
            "async_scheduling": bool(scheduler.async_scheduling),
        },
    }


def flags_of(settings: dict[str, Any]) -> list[str]:
    """The command line that makes a server with these settings; the speculation is the caller's."""
    flags = [part for name, flag in FLAGS.items() if settings.get(name) is not None for part in (flag, settings[name])]
    for name, flag in SWITCHES.items():
        if name in settings:
            flags.append(
                flag if settings[name] else flag.replace("--enable-", "--no-enable-").replace("--enf", "--no-enf")
            )
    return [str(part) for part in flags]
