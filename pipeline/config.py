"""The one configuration: a TOML file, a table a stage, dotted overrides. Secrets come from the environment."""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from pipeline.artifacts import Frozen
from pipeline.collect_config import TABLE, WORD, CollectConfig, RetentionConfig, SourceConfig
from pipeline.deploy_config import DeployConfig
from pipeline.errors import ConfigError
from pipeline.groups import of_group
from pipeline.retrain_config import RetrainConfig
from pipeline.watch_config import WatchConfig

# What an engine of ours is always given; the settings of [target] and [regenerate] say with which values.
_OWN_ENGINE_ARGS = {
    "model", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size",
    "speculative_config", "worker_cls", "additional_config", "kv_cache_memory_bytes", "per_request_spec_decode_metrics",
}  # fmt: skip


class TargetConfig(Frozen):
    """The served model, which is never changed."""

    model: Path
    """Folder with config.json, safetensors and the tokenizer."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype it is served in."""
    max_model_len: int = Field(2048, gt=0)
    """Context length, in tokens, that the fleet serves with."""


class DrafterConfig(Frozen):
    """The shape of a cold-started drafter. An adopted or trained one keeps its own."""

    num_layers: int = Field(1, gt=0)
    block_size: int = Field(8, ge=2)
    """Tokens a block, the anchor counted: num_speculative_tokens is one less."""
    target_layer_ids: tuple[int, ...] = ()
    """0-based decoder layers whose outputs the drafter reads; empty spreads five evenly."""
    mask_token_id: int | None = None
    """The token in the slots to predict. Without a value, the tokenizer's own mask token; else an error."""
    intermediate_size: int | None = None
    """MLP width; the target's where absent."""
    keeps_rope_scaling: bool = True
    """A target whose positions are scaled for long contexts (linear, dynamic, yarn, llama3) gives its drafter the same
    scaling, in training and when served; false: its theta alone."""


class InitConfig(Frozen):
    """General prompts → the first drafter, for a target that has none."""

    sources: tuple[Path, ...] = ()
    """Files of general prompts; empty takes the ones that ship."""
    num_prompts: int = Field(600, gt=0)
    gate_share: float = Field(0.05, gt=0, lt=1)
    """Nothing is judged on general prompts, so few are set aside."""
    steps: int = Field(200, gt=0)
    """Optimiser steps: the stated budget."""
    learning_rate: float = Field(4e-3, gt=0, allow_inf_nan=False)


class RegenerateConfig(Frozen):
    """PromptSet → ResponseSet, by the target on vLLM."""

    max_tokens: int = Field(256, gt=0)
    """Upper bound on a reply; the request's own limit holds where it is lower."""
    temperature: float | None = None
    """Overrides the requests' own temperature; None keeps it."""
    seed: int = 0
    rows_per_part: int = Field(64, gt=0)
    """Prompts a committed part: what a crash can cost."""
    max_reject_share: float = Field(0.1, ge=0, le=1)
    reuse: Literal["never", "exact"] = "never"
    """exact: a train row whose served reply is on record by its exact ids, by this very target and with the row's own
    sampling, is not answered again. Validation and gate rows always are. Needs collect.served_models."""
    speculate: Literal["never", "champion"] = "never"
    """champion: the drafter that serves drafts here too; replies then carry accepted drafts a step. Pays on a GPU that
    is not full."""
    rendering_url: str | None = None
    """A replica of the fleet whose own rendering of three probe chats must equal ours; None asks the engine here."""
    num_engines: int = Field(1, gt=0)
    """vLLM replicas, one Ray actor each."""
    tensor_parallel_size: int = Field(1, gt=0)
    """GPUs that share one replica."""
    max_num_seqs: int = Field(96, gt=0)
    """Requests that a replica answers at a time. Their states wait in memory until each is done: so many times the
    context, times the bytes of a token's states."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache of a CPU engine."""
    engine_args: dict[str, Any] = {}
    """Further vLLM engine arguments of a replica by their own names, such as gpu_memory_utilization, quantization, or
    enforce_eager = false for CUDA graphs (eager is what capture has been run with)."""

    @field_validator("engine_args")
    @classmethod
    def _leaves_ours(cls, engine_args: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_ENGINE_ARGS & engine_args.keys()):
            raise ValueError(f"{', '.join(taken)}: set by Slipstream, from its own settings")
        return engine_args


class CaptureConfig(Frozen):
    """ResponseSet → HiddenStateCache. Its parts are those of the responses (regenerate.rows_per_part)."""

    in_pass: bool = True
    """Keep the states while the target answers; False reads every reply once more afterwards."""
    states_format: Literal["bf16", "int8"] = "bf16"
    """bf16: the engine's own bits. int8: 8-bit words with a scale for each group of channels, about half the bytes.
    Walks are over these states as well, while serving has its own: the gate's comparison of the two has that in it."""
    shard_bytes: int = Field(256 << 20, gt=0)
    """A states file ends before it grows over this; a single row that is larger has one to itself."""
    check: Literal["auto", "reference", "head"] = "auto"
    """What the capture check compares with: a plain forward pass of the target (reference), or the engine's own next
    tokens from the last layer's states (head). auto: the reference up to 4 GB of weights."""
    check_every: int = Field(16, gt=0)
    """Parts between two samples that are read again alone and compared, during a run."""
    max_check_error: float = Field(0.1, gt=0)
    """Largest relative error a row of the capture check against a reference forward pass (bf16 noise is ~0.03)."""
    max_reject_share: float = Field(0.05, ge=0, le=1)
    max_bytes: int | None = Field(None, gt=0)
    """Byte budget of all states under the root. Older caches are removed for a new one; a corpus that is larger than
    the budget can only be streamed."""
    ttl_hours: float | None = Field(None, gt=0)
    """States older than this are removed when the next capture begins, but for those that current.json names; they can
    be made again from the ids."""
    stream: bool = False
    """Capture and train at the same time, the states as a queue of at most max_bytes between them, each row once."""
    storage: str | None = None
    """Object storage that finished states files are moved to (s3://bucket/prefix); readers stage them locally."""
    staging_bytes: int = Field(8 << 30, gt=0)
    """Disk that staged states files may take. A training run that goes on with another value has another order."""

    @model_validator(mode="after")
    def _stream_has_a_budget(self) -> Self:
        if self.stream and self.max_bytes is None:
            raise ValueError("stream = true needs max_bytes: the disk that the states may take")
        return self


class TrainConfig(Frozen):
    """HiddenStateCache + starting drafter → DrafterCheckpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(400, gt=0)
    """Optimiser steps: the stated budget."""
    blocks_per_step: int = Field(64, gt=0)
    """Blocks (anchors) in one optimiser step, at most: so many whole rows of anchors_per_row as fit."""
    anchors_per_row: int = Field(32, gt=0)
    """At most this many anchors of one reply in one pass over it."""
    anchors: Literal["uniform", "on_policy"] = "on_policy"
    """uniform: every legal anchor is as likely. on_policy: as likely as the drafter's own walk is to visit it, by what
    earlier steps accepted; bench/train.py compares them. A stream's own rows have uniform ones."""
    uniform_share: float = Field(0.25, gt=0, le=1)
    """Of on-policy anchors: the share that is drawn uniformly all the same."""
    max_row_weight: int = Field(16, gt=0)
    """A prompt that was served n times counts n times in the loss among those of its source, at most so often; 1: every
    row counts once."""
    replay_share: float = Field(0.5, ge=0, lt=1)
    """Share of the steps' rows that comes from earlier data, where there is some: the general states of
    `slipstream init-drafter` and what --replay names. Against forgetting: less of it learns more from the traffic, and
    forgets more of the rest (README). It is the share of the loss, too: the weights of each source are divided by their
    own mean, so traffic that repeats does not outweigh what is replayed."""
    learning_rate: float = Field(2e-3, gt=0)
    """Of every optimiser: Muon steps have the size of AdamW's."""
    optimizer: Literal["muon", "adamw"] = "muon"
    muon_turns: int = Field(1, gt=0)
    """Muon updates each matrix at every so many steps alone, by as many times the learning rate: what it costs is
    spread over them. Pays where a step has few blocks."""
    loss: Literal["dpace", "decay"] = "dpace"
    dpace_alpha: float = Field(0.5, gt=0, le=1)
    decay_gamma: float | None = Field(None, gt=0)
    """None takes the published value for the block size."""
    sampled_vocabulary: int | None = Field(None, gt=0)
    """None: the loss is over the whole vocabulary. A number: over the tokens that occur in the replies and so many
    sampled ones that stand for all others, anew each step; several times faster where the head dominates."""
    warmup_share: float = Field(0.04, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled, times the learning rate, of matrices: against learning a small cache by heart."""
    grad_clip: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0, lt=2**32)
    checkpoint_every: int = Field(100, gt=0)
    """Steps between resumable checkpoints, which are also the walk measurements."""
    walk_rows: int = Field(48, gt=0)
    """Validation rows that a walk measurement uses."""
    patience: int | None = Field(5, gt=0)
    """Stop when so many measurements in a row did not raise the walk acceptance; None: never stop early."""
    warm_start_tolerance: float = Field(0.03, gt=0)
    """Step 0 of a warm start must come so near to the starting drafter's recorded walk on the same rows (relative, of
    accepted drafts a step, beside what so many near-ties scatter by), or the run stops."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """What matrices are multiplied in; weights and optimiser are float32. auto: bfloat16 where the hardware has it."""
    tokens_per_pass: int = Field(16384, gt=0)
    """Context tokens in one forward pass: a step that has more accumulates its gradient over several."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """torch.compile the layers; pays on a GPU."""
    num_workers: int = Field(1, gt=0)
    """Ray Train workers."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several workers: ddp keeps the whole drafter on each; fsdp (FSDP2) shards weights, gradients and optimiser."""
    control: bool = False
    """Also train a control: the champion on general prompts for the same budget. Is it the traffic, or just more
    training? Needs the general states of `slipstream init-drafter`."""


class SweepConfig(Frozen):
    """Short runs at several learning rates → the rate with the best walk acceptance on validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learning_rates: tuple[Annotated[float, Field(gt=0)], ...] = Field((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), min_length=1)
    steps: int = Field(100, gt=0)
    """Optimiser steps of each run, each on its own whole schedule."""


class EvaluateConfig(Frozen):
    """Champion and challengers → AcceptanceReport, served on vLLM."""

    server_url: str | None = None
    """An idle replica with our control endpoint; None starts one."""
    concurrency: int = Field(8, gt=0)
    """Requests at a time: production's. The verdict on speed and tail latency holds for it."""
    max_tokens: int = Field(128, gt=0)
    max_prompts: int | None = Field(None, gt=0)
    blocks: int = Field(8, gt=0)
    """Sittings of the alternation A B B A … that the prompts are dealt into. The verdict on speed needs several."""
    early_stop: bool = True
    """Look after every sitting, and end where the policy's verdict is settled; its error rate holds all the same."""
    sampling: Literal["greedy", "traffic"] = "greedy"
    """traffic: every request's own temperature and top-p, with a seed of its own. Walks cover greedy ones alone."""
    seed: int = 0
    max_repeat_share: float = Field(0.5, gt=0, le=1)
    """A reply with a larger share of repeated 4-grams is a loop and isn't counted; 1 counts every reply."""
    general_sources: tuple[Path, ...] = ()
    """Prompt files that guard against narrowing, such as public sets; empty takes the prompts that ship."""
    general_prompts: int = Field(24, ge=0)
    """So many of them are served beside the gate set; 0: none."""


class SpeedConfig(Frozen):
    """One drafter → SpeedReport: tokens/s and latencies against concurrency, with and without speculation."""

    concurrencies: tuple[int, ...] = ()
    """Measured beside evaluate.concurrency, which always is. Where any is named, `slipstream run` measures speed."""
    num_speculative_tokens: tuple[int, ...] = ()
    """Numbers to sweep; empty: the drafter's own. The target alone (0) is always measured."""
    requests_per_slot: int = Field(4, gt=0)
    """Requests a point, for each of its concurrent clients."""
    repeats: int = Field(2, gt=0)
    """Runs of every point; the servers take turns in opposite order."""
    lossless_prompts: int = Field(16, ge=0)
    """Greedy replies with and without speculation that are compared token for token."""


class GateConfig(Frozen):
    """AcceptanceReport → GateDecision: the policy, kept beside every decision."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_lift: float = Field(1.0, gt=0)
    """The lower end of the interval of challenger over champion must be above this ratio."""
    error_rate: float = Field(0.05, gt=0, lt=0.5)
    """Share of gates that may promote a challenger which is no better than min_lift; intervals are one-sided at it."""
    power: float = Field(0.8, gt=0.5, lt=1)
    """Share of gates that must promote a challenger which is better by worthwhile_lift."""
    worthwhile_lift: float = Field(1.05, gt=1)
    """The smallest gain over min_lift worth finding, as a ratio: how many prompts are enough follows from it."""
    min_clusters: int = Field(30, gt=0)
    """Fewer conversations give no verdict."""
    min_slice_lift: float = Field(0.9, gt=0)
    """No slice may be shown to be under this ratio, corrected for the number of slices."""
    min_slice_clusters: int = Field(5, gt=1)
    """A slice of fewer conversations is shown and blocks nothing."""
    min_position_ratio: float = Field(0.5, ge=0, lt=1)
    """At no later position of a block may the challenger be shown to have drafts accepted, of those that get there, at
    less than this share of its first position's rate."""
    min_general_lift: float = Field(0.9, gt=0)
    """General prompts may not be shown to be under this ratio."""
    min_speed_ratio: float = Field(0.95, gt=0)
    """Output tokens/s, challenger over champion, at the evaluated concurrency: the lower end must be above this."""
    max_tail_ratio: float = Field(1.25, gt=0)
    """99th percentile of the time between a client's tokens, challenger over champion, at the same concurrency."""
    max_walk_gap: float = Field(0.05, gt=0)
    """Largest relative difference of accepted drafts a step between the offline walk and serving."""
    require_walk: bool = True
    """Without a walk of the challenger there is no promotion; a comparison of drafters without cached states turns it
    off."""
    require_losslessness: bool = False
    """Without replies compared with and without speculation (`slipstream speed`) there is no promotion."""
    max_drift: float = Field(0.1, gt=0)
    """Where only restarts are possible: the champion's second visit may differ from its first by this share."""
    max_flagged_share: float = Field(0.2, ge=0, lt=1)
    """More unusable replies than this, and what is left is a selection."""
    min_recorded_share: float = Field(0.5, ge=0)
    """A champion that accepts less than this share of what it was last measured at: suspect the environment."""
    resamples: int = Field(10_000, ge=1000)
    seed: int = 0


class PromoteConfig(Frozen):
    """GateDecision → MLflow version and alias."""

    tracking_uri: str | None = None
    """MLflow server; None keeps SQLite and a folder under the run root."""


class ServingConfig(Frozen):
    """The vLLM server that this machine starts, and how replicas are reached."""

    replicas: tuple[str, ...] = ()
    """Base URLs that deploy swaps; deploy.kubernetes_service names a service instead."""
    host: str = "127.0.0.1"
    port: int = 8000
    kv_cache_gib: int = Field(1, gt=0)
    """KV cache of a CPU server; vLLM's own setting takes whole GiB."""
    max_num_seqs: int = Field(16, gt=0)
    token_env: str = "SLIPSTREAM_CONTROL_TOKEN"
    """Environment variable that holds the control endpoint's bearer token."""


class Config(Frozen):
    """slipstream.toml."""

    workload: str = Field("default", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Names the registered model and the folders, with the target."""
    root: Path = Path("runs/default")
    """Where artifacts go; absolute when the job runs from a Ray working directory."""
    split_key_env: str = "SLIPSTREAM_SPLIT_KEY"
    """Environment variable with the key of the split hash. Unset, a key file is made under the root, mode 0600. A
    group's name is appended: groups have different keys."""
    target: TargetConfig
    drafter: DrafterConfig = DrafterConfig()
    init: InitConfig = InitConfig()
    collect: CollectConfig = CollectConfig()
    retention: RetentionConfig = RetentionConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    capture: CaptureConfig = CaptureConfig()
    train: TrainConfig = TrainConfig()
    sweep: SweepConfig = SweepConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    speed: SpeedConfig = SpeedConfig()
    gate: GateConfig = GateConfig()
    promote: PromoteConfig = PromoteConfig()
    retrain: RetrainConfig = RetrainConfig()
    serving: ServingConfig = ServingConfig()
    deploy: DeployConfig = DeployConfig()
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="after")
    def _reuse_tells_adapters_apart(self) -> Self:
        if self.regenerate.reuse == "exact" and not self.collect.served_models:
            raise ValueError(
                'regenerate.reuse = "exact" needs collect.served_models: an adapter\'s replies are on record under the '
                "fingerprint of its target, and only the name that was asked for tells the two apart"
            )
        return self

    @property
    def model_name(self) -> str:
        """The registered model: one per target and workload."""
        return f"{self.target.model.name}--{self.workload}".lower()


def load_config(path: Path, overrides: Sequence[str] = (), *, group: str | None = None) -> Config:
    """The resolved configuration; relative paths in the file are relative to the file.

    Overrides are ``table.key=value``, the value in TOML (bare words are taken as strings). ``group`` takes the settings
    of that group of tenants (pipeline/groups.py).

    Raises: ConfigError with the file, the key and what was expected.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; give one with --config, infra/slipstream.toml is a model")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}")
    base = path.resolve().parent
    return resolve(of_group(data, group, where=str(path), base=base), overrides, where=str(path), base=base)


def resolve(data: dict[str, Any], overrides: Sequence[str] = (), *, where: str, base: Path) -> Config:
    """The configuration that these tables and overrides make; relative paths are relative to ``base``.

    Raises: ConfigError with the key and what was expected; ``where`` says what the tables came from.
    """
    for override in overrides:
        _apply(data, override)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        lines = [_unusable(e["loc"], e["msg"], e["input"]) for e in error.errors()]
        raise ConfigError(f"{where}: {len(lines)} setting(s) cannot be used:\n" + "\n".join(lines))
    return _anchor_paths(config, base)


def _unusable(place: tuple[int | str, ...], what: str, found: Any) -> str:
    key = ".".join(str(part) for part in place if part not in (TABLE, WORD))
    told = f"{key}: {what}" if key else what
    # Of settings that don't go together, a whole table was found.
    return f"  {told}" if isinstance(found, dict) else f"  {told} (found {found!r})"


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected table.key=value, for instance train.steps=200")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    *tables, last = key.split(".")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {override!r}: {table} is a value, not a table")
    data[last] = value


def _anchor_paths(config: Config, base: Path) -> Config:
    def absolute(path: Path) -> Path:
        return path if path.is_absolute() else Path(os.path.normpath(base / path))

    def anchored(entry: Path | str | SourceConfig) -> Path | str | SourceConfig:
        if isinstance(entry, SourceConfig):
            return entry.model_copy(update={"path": anchored(entry.path)})
        return absolute(entry) if isinstance(entry, Path) else entry

    in_ray_upload = "runtime_resources" in base.parts and "working_dir_files" in base.parts
    if in_ray_upload and not (config.root.is_absolute() and config.target.model.is_absolute()):
        raise ConfigError(
            f"root = {config.root} and target.model = {config.target.model} must be absolute in a Ray job: the "
            "working directory is a copy that is deleted. Add --set root=/shared/runs --set target.model=/shared/model"
        )
    return config.model_copy(
        update={
            "root": absolute(config.root),
            "target": config.target.model_copy(update={"model": absolute(config.target.model)}),
            "collect": config.collect.model_copy(update={"sources": tuple(map(anchored, config.collect.sources))}),
            "watch": config.watch.model_copy(update={"sources": tuple(map(anchored, config.watch.sources))}),
            "init": config.init.model_copy(update={"sources": tuple(map(absolute, config.init.sources))}),
            "evaluate": config.evaluate.model_copy(
                update={"general_sources": tuple(map(absolute, config.evaluate.general_sources))}
            ),
        }
    )
