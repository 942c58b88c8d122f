"""A reward without any gradient: how few bytes the video takes as an H.264 file. Needs NumPy, ffmpeg and
`pip install ./python/roll_reward`.

    roll run --algo diffusion_nft --model wan2_2 --set reward.name=command \\
        --set 'reward.command=[python3, examples/reward_python/mp4_size.py]' --set reward.options.prefer=small
"""

import subprocess

import numpy as np
import roll_reward


@roll_reward.reward
def score(frames, fps, options):
    """The logarithm of bytes a frame, at constant quality: smaller is better unless `prefer` is `large`."""
    count, _, height, width = frames.shape
    pixels = np.clip(np.rint((frames + 1) * 127.5), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    command = ["ffmpeg", "-v", "error", "-threads", "1", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
    command += ["-r", str(fps or 16), "-i", "-", "-c:v", "libx264", "-crf", "23", "-pix_fmt", "yuv420p"]
    command += ["-f", "mp4", "-movflags", "frag_keyframe+empty_moov", "-"]
    size = len(subprocess.run(command, input=pixels.tobytes(), stdout=subprocess.PIPE, check=True).stdout)
    value = float(np.log(size / count))
    return (value if options.get("prefer") == "large" else -value), {"bytes": size}


if __name__ == "__main__":
    roll_reward.serve(score)
