"""Draws held-out prompts of a finished run of the picture demo: above the base model's pictures, below the trained model's.

    python demo/picture/sheet.py runs/picture demo/assets/portraits.png

Both start from the same noise. Needs Pillow.
"""

import pathlib
import sys
import textwrap

from PIL import Image, ImageDraw, ImageFont

# Prompts that differ in every attribute, by their lines in unseen.txt.
SHOWN = [1, 17, 23, 32, 34, 43]
SIDE, GAP, LEFT, TEXT = 110, 4, 78, 58

run, output = pathlib.Path(sys.argv[1]), sys.argv[2]
prompts = (pathlib.Path(__file__).resolve().parents[1] / "assets/z_image/unseen.txt").read_text().splitlines()
sheet = Image.new("RGB", (LEFT + len(SHOWN) * (SIDE + GAP), TEXT + 2 * (SIDE + GAP)), "white")
draw = ImageDraw.Draw(sheet)
font = ImageFont.load_default(12)
for column, prompt in enumerate(SHOWN):
    x = LEFT + column * (SIDE + GAP)
    words = prompts[prompt].removeprefix("a person with ").replace(" and ", ", ")
    draw.multiline_text((x, 2), "\n".join(textwrap.wrap(words, 20)), "black", font)
    for row, part in enumerate(["before", "after"]):
        picture = Image.open(run / f"samples/{part}/unseen-{prompt:03}.png").convert("RGB")
        sheet.paste(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC), (x, TEXT + row * (SIDE + GAP)))
for row, word in enumerate(["base", "trained"]):
    draw.text((4, TEXT + row * (SIDE + GAP) + SIDE // 2 - 8), word, "black", ImageFont.load_default(16))
sheet.save(output, optimize=True)
