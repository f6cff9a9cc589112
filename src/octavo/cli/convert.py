"""Write any readable checkpoint (GGUF, compressed-tensors, plain) as plain safetensors with config and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.settings import setting

EXAMPLES = """
  octavo convert demo --output-dir smollm2
  octavo convert model.gguf --output-dir model-f32 --dtype float32
"""


@dataclass
class ConvertSettings:
    """What to convert."""

    model: str = setting(help="directory, .gguf file, Hugging Face id, or demo", positional=True)
    output_dir: str = setting(help="Directory to write", metavar="DIR")
    dtype: str = setting("bfloat16", "Type of the weights", choices=("bfloat16", "float16", "float32"))


def settings() -> tuple[type, ...]:
    return (ConvertSettings,)


def run(s: ConvertSettings) -> int:
    from octavo.checkpoint.convert import convert

    print(f"wrote {convert(s.model, s.output_dir, s.dtype)}")
    return 0
