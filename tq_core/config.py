"""What is stored: key and value formats, and the named presets."""

from __future__ import annotations

from dataclasses import dataclass

KEY_FORMATS = ("mse2", "mse3", "mse4", "fp8")
VALUE_FORMATS = ("int2", "int3", "int4", "int8", "mse2", "mse3", "mse4")
KEY_PACKINGS = ("dense", "planar")

#: Name -> (key format, value format).
PRESETS: dict[str, tuple[str, str]] = {
    "k8v8": ("fp8", "int8"),
    "k8v4": ("fp8", "int4"),
    "4bit": ("mse4", "int4"),
    "k3v4": ("mse3", "int4"),
    "3bit": ("mse3", "int3"),
    "2bit": ("mse2", "int2"),
    "4bit_hq": ("mse4", "mse4"),
    "3bit_hq": ("mse3", "mse3"),
    "2bit_hq": ("mse2", "mse2"),
}

#: The names under which vLLM knows the same formats.
PRESET_ALIASES: dict[str, str] = {
    "turboquant_k8v4": "k8v4",
    "turboquant_4bit_nc": "4bit",
    "turboquant_k3v4_nc": "k3v4",
    "turboquant_3bit_nc": "3bit",
}


@dataclass(frozen=True)
class QuantConfig:
    """Formats of keys and values. Hashable, so it can be a static argument of ``jax.jit``.

    Args:
        key: ``"mse2"``, ``"mse3"``, ``"mse4"`` (rotated, codebook, one fp16 scale a
            token and head) or ``"fp8"`` (e4m3fn, no rotation).
        value: ``"int2"``, ``"int3"``, ``"int4"``, ``"int8"`` (affine: fp16 scale and zero a token
            and head) or ``"mse2"``, ``"mse3"``, ``"mse4"`` (rotated, codebook, one scale).
        norm_correction: fold the length of the chosen centroids into the stored scale of every
            codebook format, so that a reconstructed vector has the length of the original.
            Has no effect on ``fp8`` keys with affine values.
        key_packing: bit order of key codes, ``"dense"`` or, for ``"mse3"`` alone, ``"planar"``.

    Raises:
        ValueError: an unknown format or a combination that does not exist.

    Example:
        >>> QuantConfig.preset("k3v4")
        QuantConfig(key='mse3', value='int4', norm_correction=True, key_packing='dense')
    """

    key: str = "mse4"
    value: str = "int4"
    norm_correction: bool = True
    key_packing: str = "dense"

    def __post_init__(self) -> None:
        _one_of("key", self.key, KEY_FORMATS)
        _one_of("value", self.value, VALUE_FORMATS)
        _one_of("key_packing", self.key_packing, KEY_PACKINGS)
        if not isinstance(self.norm_correction, bool):
            raise TypeError(f"norm_correction: expected a bool, got {self.norm_correction!r}")
        if self.key_packing == "planar" and self.key != "mse3":
            raise ValueError(
                f"key_packing: 'planar' exists for key='mse3' only, got key={self.key!r}; "
                "use key_packing='dense'"
            )

    @classmethod
    def preset(cls, name: str) -> QuantConfig:
        """The configuration called ``name`` (a preset of ``PRESETS`` or one of its aliases)."""
        resolved = PRESET_ALIASES.get(name, name)
        if resolved not in PRESETS:
            raise ValueError(
                f"preset: expected one of {sorted((*PRESETS, *PRESET_ALIASES))}, got {name!r}"
            )
        key, value = PRESETS[resolved]
        return cls(key=key, value=value)

    @property
    def key_bits(self) -> int:
        """Bits of one key code."""
        return 8 if self.key == "fp8" else int(self.key[-1])

    @property
    def value_bits(self) -> int:
        """Bits of one value code."""
        return int(self.value[-1])

    @property
    def key_is_codebook(self) -> bool:
        """Keys are rotated, coded with a codebook and carry a scale (every format but fp8)."""
        return self.key != "fp8"

    @property
    def value_is_codebook(self) -> bool:
        """Values are rotated and coded with a codebook; otherwise they are affine."""
        return self.value.startswith("mse")

    @property
    def meta_fields(self) -> tuple[str, ...]:
        """Names of the 2-byte metadata fields of a token and head, in stored order."""
        key = ("key_scale",) if self.key_is_codebook else ()
        value = ("value_scale",) if self.value_is_codebook else ("value_scale", "value_zero")
        return key + value


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {list(allowed)}, got {value!r}")
