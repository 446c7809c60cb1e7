"""Do transformers and compressed-tensors read what `quantize` writes, and as the same numbers?

    quantize --model MODEL --weights nvfp4 --output out
    quantize --model out --weights f32 --output out-f32
    python docs/check_formats.py out out-f32

`out-f32` holds what this workspace takes the weights of `out` for. transformers loads `out`, dequantising it, and every
parameter must equal them; then compressed-tensors decompresses each module of the file by itself, which also covers the
modules that transformers has no place for (the MTP block). docs/formats.md says with which versions it was run.
"""

import glob
import json
import re
import sys

import torch
from safetensors.torch import load_file


def tensors(folder):
    out = {}
    for file in sorted(glob.glob(folder + "/*.safetensors")):
        out.update(load_file(file))
    return out


def expected(reference, name):
    """The reference of a parameter: also of one whose experts the model keeps fused."""
    for prefix in ["model.language_model.", "model."]:
        full = name.replace("model.", prefix, 1) if name.startswith("model.") else name
        if full in reference:
            return reference[full]
        stem, leaf = full.rsplit(".", 1)
        if leaf not in ("gate_up_proj", "down_proj"):
            continue
        parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[leaf]
        if f"{stem}.0.{parts[0]}.weight" in reference:
            count = sum(key.startswith(stem + ".") and key.endswith(f".{parts[0]}.weight") for key in reference)
            rows = [torch.cat([reference[f"{stem}.{e}.{p}.weight"] for p in parts]) for e in range(count)]
            return torch.stack(rows)
    return None


def check_transformers(folder, method, reference):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    config = CompressedTensorsConfig if method == "compressed-tensors" else FineGrainedFP8Config
    arguments = {"quantization_config": config(dequantize=True)} if method else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    parameters = model.state_dict()
    different = []
    for name, got in parameters.items():
        want = expected(reference, name)
        if want is None and name == "lm_head.weight":
            want = expected(reference, "model.embed_tokens.weight")
        # transformers dequantises NVFP4 to BF16, whatever it is asked for.
        if want is None or not (torch.equal(got, want) or torch.equal(got, want.bfloat16().float())):
            different.append(name)
    return len(parameters), different


def check_modules(stored, config, reference):
    from compressed_tensors.compressors import BaseCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    count, different = 0, []
    modules = {name.rsplit(".", 1)[0] for name in stored if name.endswith(".weight_scale")}
    for group in config["config_groups"].values():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
        compressor = BaseCompressor.get_value_from_registry(group["format"])
        for module in sorted(m for m in modules if any(re.match(t.removeprefix("re:"), m) for t in group["targets"])):
            state = {n.rsplit(".", 1)[1]: t for n, t in stored.items() if n.rsplit(".", 1)[0] == module}
            library = compressor.decompress(state, scheme)["weight"]
            if "weight_packed" in state:
                # The same steps in f32, since the library's own result is rounded to BF16.
                packed = state["weight_packed"]
                codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
                scale, top = state["weight_scale"].float(), state["weight_global_scale"]
                exact = dequantize(x_q=codes, scale=scale, args=scheme.weights, global_scale=top, dtype=torch.float32)
            else:
                exact = library
            want = reference[module + ".weight"]
            count += 1
            if not (torch.equal(exact, want) and torch.equal(library, want.to(library.dtype))):
                different.append(module)
        modules -= {m for m in modules if any(re.match(t.removeprefix("re:"), m) for t in group["targets"])}
    different.extend(f"{module} (in no group)" for module in sorted(modules))
    return count, different


def main(folder, reference_folder):
    config = json.load(open(folder + "/config.json")).get("quantization_config", {})
    method = config.get("quant_method")
    reference = tensors(reference_folder)
    results = {}
    try:
        results["transformers"] = check_transformers(folder, method, reference)
    except RuntimeError as error:
        print(f"{folder}: transformers does not load it: {error}")
    if method == "compressed-tensors":
        results["compressed-tensors"] = check_modules(tensors(folder), config, reference)
    for library, (count, different) in results.items():
        print(f"{folder}: {library}: {count - len(different)} of {count} equal", *different[:5])
    return any(different for _, different in results.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
