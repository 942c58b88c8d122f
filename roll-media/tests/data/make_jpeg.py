"""Makes the JPEG files of this directory, by Pillow 13: python make_jpeg.py"""

from PIL import Image

picture = Image.new("RGB", (40, 24))
picture.putdata([(x * 6, y * 10, (x * y * 37 + x * x) % 256) for y in range(24) for x in range(40)])
picture.save("baseline.jpg", quality=80, subsampling=2)
picture.save("full_chroma.jpg", quality=80, subsampling=0, optimize=True)
picture.save("progressive.jpg", quality=80, subsampling=2, progressive=True)
picture.save("restart.jpg", quality=80, subsampling=2, restart_marker_blocks=2)
