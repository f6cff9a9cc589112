"""Files and named tensors: safetensors, compressed-tensors and GGUF are read into one layout, and written.

Tensor names are always Hugging Face's. `reader.open_checkpoint` is the way in, `writer` and `convert` the way out,
`source.resolve_model` turns what a user calls a model into a path.
"""
