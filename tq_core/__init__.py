"""TurboQuant KV cache without a framework: format, codec, reference and shared kernels."""

from tq_core.codec import Codec
from tq_core.config import PRESET_ALIASES, PRESETS, QuantConfig
from tq_core.layout import CacheLayout
from tq_core.snapshot import CacheFile, load_cache, save_cache
from tq_core.support import why_unsupported

__all__ = [
    "PRESETS",
    "PRESET_ALIASES",
    "CacheFile",
    "CacheLayout",
    "Codec",
    "QuantConfig",
    "load_cache",
    "save_cache",
    "why_unsupported",
]
__version__ = "0.1.0"
