"""Runs the tiny Z-Image of `roll init-tiny` in diffusers, without and with the LoRA files under test.

    python tests/scripts/zimage_lora.py DIR

DIR holds model/ (a diffusers directory), inputs.safetensors (latents [16, 1, H, W], caption [L, width], t [1]) and the
LoRA files under test (lora_*.safetensors). Writes DIR/outputs.safetensors: the velocity (noise - clean, minus the raw
output) `base` and one by the name of each LoRA file, `picture` (the decoded latents) and `caption` (the features of a
prompt).
Exits with 77 when a package is not there.
"""

import pathlib
import sys

try:
    import diffusers
    import peft
    import safetensors.torch
    import torch
except ImportError as error:
    print(error)
    sys.exit(77)
if not hasattr(diffusers, "ZImagePipeline"):
    print(f"diffusers {diffusers.__version__} has no Z-Image")
    sys.exit(77)

torch.use_deterministic_algorithms(True)
directory = pathlib.Path(sys.argv[1])
pipe = diffusers.ZImagePipeline.from_pretrained(directory / "model", torch_dtype=torch.float32)
inputs = safetensors.torch.load_file(directory / "inputs.safetensors")


@torch.no_grad()
def velocity():
    [output] = pipe.transformer([inputs["latents"]], inputs["t"], [inputs["caption"]], return_dict=False)[0]
    return -output


outputs = {"base": velocity()}
for file in sorted(directory.glob("lora_*.safetensors")):
    pipe.load_lora_weights(directory, weight_name=file.name, adapter_name=file.stem)
    layers = [m for m in pipe.transformer.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert layers, f"{file.name}: no layer was loaded"
    outputs[file.stem] = velocity()
    pipe.unload_lora_weights()
with torch.no_grad():
    config = pipe.vae.config
    latents = inputs["latents"].transpose(0, 1) / config.scaling_factor + config.shift_factor
    outputs["picture"] = pipe.vae.decode(latents, return_dict=False)[0]
prompt, _ = pipe.encode_prompt("a portrait", device="cpu", do_classifier_free_guidance=False)
outputs["caption"] = prompt[0].detach()
safetensors.torch.save_file({name: value.contiguous() for name, value in outputs.items()}, directory / "outputs.safetensors")
print(f"diffusers {diffusers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
