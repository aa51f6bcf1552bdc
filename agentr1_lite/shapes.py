"""The shapes of models: what a memory plan and a model of random weights need, without any weights.

The table holds the published numbers (each model's ``config.json``), so that a plan needs no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# model_type of a config.json → whether q, k and v have biases, whether q and k are normalised per head
FAMILIES = {"qwen2": (True, False), "qwen3": (False, True), "llama": (False, False), "mistral": (False, False)}

COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
COUNTS += ("intermediate_size", "vocab_size")


@dataclass(frozen=True)
class Shape:
    """A decoder of ``layers`` equal layers: grouped attention and a gated MLP.

    ``heads`` · ``head_dim`` queries share ``kv_heads`` · ``head_dim`` keys and values; ``tied``: the output layer is
    the embedding; ``context``: tokens it can attend to; ``family``: its ``model_type``.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    context: int = 32768
    family: str = "qwen2"

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the seven linear layers of one decoder layer; LoRA adapts them, 4 bits store them."""
        h, q, k, i = self.hidden, self.queries, self.keys, self.intermediate
        return {"q": (h, q), "k": (h, k), "v": (h, k), "o": (q, h), "gate": (h, i), "up": (h, i), "down": (i, h)}

    @property
    def linear_weights(self) -> int:
        """Weights of the linear layers of all decoder layers."""
        return self.layers * sum(a * b for a, b in self.linears().values())

    @property
    def backbone_weights(self) -> int:
        """All weights but the output layer: embedding, linear layers, biases, norms."""
        bias, normed = FAMILIES[self.family]
        small = 2 * self.hidden + bias * (self.queries + 2 * self.keys) + normed * 2 * self.head_dim
        return self.vocab * self.hidden + self.linear_weights + self.layers * small + self.hidden

    @property
    def parameters(self) -> int:
        return self.backbone_weights + (0 if self.tied else self.vocab * self.hidden)

    def lora_weights(self, rank: int) -> int:
        """Weights of one adapter on every linear layer: r · (in + out) each."""
        return self.layers * rank * sum(a + b for a, b in self.linears().values())

    def config(self) -> Any:
        """The ``transformers`` configuration of this shape."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            max_position_embeddings=self.context,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("atlas-tiny", 128, 4, 4, 4, 32, 384, 1536, context=2048),
        Shape("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, context=8192, family="llama"),
        Shape("qwen2.5-0.5b", 896, 24, 14, 2, 64, 4864, 151936),
        Shape("qwen2.5-1.5b", 1536, 28, 12, 2, 128, 8960, 151936),
        Shape("qwen2.5-3b", 2048, 36, 16, 2, 128, 11008, 151936),
        Shape("qwen2.5-7b", 3584, 28, 28, 4, 128, 18944, 152064, tied=False),
    )
}
SHAPES["atlas-agent"] = SHAPES["atlas-tiny"]


def shape_of(model: str | Path | Shape) -> Shape:
    """The shape of a known name, of a folder, or of a hub id, whose ``config.json`` alone is fetched.

    Raises:
        PolicyError: one sentence: no such model, no network, or a kind of model that is not known here.
    """
    if isinstance(model, Shape):
        return model
    if str(model).lower() in SHAPES and not Path(model).is_dir():
        return SHAPES[str(model).lower()]
    from transformers import AutoConfig

    from agentr1_lite import loading, storage

    source = loading.resolve(model)
    if source.endswith(".gguf"):
        raise loading.PolicyError(f"the shape of {source!r} is not read from GGUF files; plan with a name or folder")
    adapter = loading.adapter_settings(source)
    if adapter is not None:
        return shape_of(storage.find_base(Path(source), adapter["base"])[0])
    known = {hub.lower(): name for name, hub in loading.HUB_IDS.items()}
    if source.lower() in known:
        return SHAPES[known[source.lower()]]
    options = loading.hub_options(source)
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        said = " ".join(str(error).split())[:160].rstrip(". ")
        advice = "its config.json is broken" if Path(source).is_dir() else "check the name and the network"
        raise loading.PolicyError(
            f"the shape of model {str(model)!r} could not be read ({said}); "
            f"{advice}, or plan with one of {', '.join(SHAPES)}"
        ) from error
    return from_config(config, str(model))


def from_config(config: Any, name: str) -> Shape:
    """The shape that a ``transformers`` configuration describes."""
    from agentr1_lite.loading import PolicyError, context_length

    if config.model_type not in FAMILIES:
        raise PolicyError(
            f"model {name!r} is a {config.model_type!r}; its memory can be planned for {', '.join(FAMILIES)} alone"
        )
    counts = {key: getattr(config, key) for key in COUNTS}
    if wrong := next((key for key, value in counts.items() if not isinstance(value, int) or value < 1), None):
        raise PolicyError(
            f"config.json of {name!r}: {wrong} is {counts[wrong]!r}; expected a whole number of 1 or more"
        )
    stored = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if stored is not None:
        raise PolicyError(f"model {name!r} is stored in {stored}; plan with the model that it was made from")
    return Shape(
        name,
        *(counts[key] for key in COUNTS[:4]),
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        *(counts[key] for key in COUNTS[4:]),
        tied=config.tie_word_embeddings,
        context=context_length(config),
        family=config.model_type,
    )
