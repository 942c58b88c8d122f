"""Answers of transformers with an adapter of PEFT on a Qwen2-VL: `peft_vision.py BASE ADAPTER PICTURE TEXT TOKENS`.

The picture's sides are multiples of a square, so that it is not resized. Prints the answer's token ids as JSON. Exits with
77 if a package is missing.
"""

import json
import sys

try:
    import numpy
    import torch
    from peft import PeftModel
    from PIL import Image
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import Qwen2VLForConditionalGeneration
except ImportError as error:
    print(error)
    sys.exit(77)

base, adapter, picture, text, tokens = sys.argv[1:]
network = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
network = PeftModel.from_pretrained(network, adapter).eval()

parameters = dict(network.named_parameters())
saved = load_file(f"{adapter}/adapter_model.safetensors")
for name, value in saved.items():
    if name.endswith(("lora_A.weight", "lora_B.weight")):
        assert torch.equal(parameters[name.replace(".weight", ".default.weight")], value), name

processor = json.load(open(f"{base}/preprocessor_config.json"))
patch, merge = processor["patch_size"], processor["merge_size"]
mean, std = (torch.tensor(processor[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
pixels = torch.from_numpy(numpy.array(Image.open(picture).convert("RGB"))).permute(2, 0, 1).float() / 255
pixels = (pixels - mean) / std
rows, columns = (side // patch for side in pixels.shape[1:])
# Squares of patches row by row, in each the patches row by row; of each patch the colours, frames, rows and columns.
patches = pixels.view(3, rows // merge, merge, patch, columns // merge, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
patches = patches.reshape(rows * columns, 3, 1, patch, patch).expand(-1, -1, processor["temporal_patch_size"], -1, -1)
seen = {"pixel_values": patches.reshape(rows * columns, -1), "image_grid_thw": torch.tensor([[1, rows, columns]])}
squares = rows * columns // merge**2
text = text.replace("\ufffc", "<|vision_start|>" + "<|image_pad|>" * squares + "<|vision_end|>")
ids = torch.tensor([Tokenizer.from_file(f"{base}/tokenizer.json").encode(text, add_special_tokens=False).ids])
kinds = (ids == network.config.image_token_id).int()
answer = []
with torch.no_grad():
    for _ in range(int(tokens)):
        more = {"mm_token_type_ids": torch.nn.functional.pad(kinds, (0, ids.shape[1] - kinds.shape[1]))}
        logits = network(input_ids=ids, **seen, **more, use_cache=False).logits[0, -1]
        for placeholder in (network.config.image_token_id, network.config.video_token_id):
            logits[placeholder] = -torch.inf
        answer.append(int(logits.argmax()))
        ids = torch.cat((ids, torch.tensor([answer[-1:]])), dim=1)
print(json.dumps(answer))
